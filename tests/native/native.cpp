// The torch-free kernels of one instruction set as a Python module, for test_native.py. Arrays are addresses here, so
// that the tests decide where each begins and ends and how its elements lie.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/cpu_capability.h"
#include "common/gemm.h"
#include "common/vec_io.h"
#include "ops/deform_conv2d/cpu/deform_conv2d_layout.h"
#include "ops/deform_conv2d/cpu/deform_conv2d_sampling.h"
#include "ops/deform_conv2d/deform_conv2d_math.h"

namespace py = pybind11;

namespace myvision::CPU_CAPABILITY {
namespace {

using namespace deform_conv2d;

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// ---- matrix product
template <typename T>
void gemm_tile_of_rows(Address a, int64_t a_row, int64_t a_step, Address b, int64_t b_step, int64_t rows, int64_t depth,
                       Address c, int64_t ldc, bool accumulate) {
  constexpr std::make_integer_sequence<int, GemmTile<T>::kRows> all_rows;
  const GemmLeft<T> left{at<T>(a), a_row, a_step};
  const GemmRight<T> right{at<T>(b), b_step};
  detail::tile_of_rows<T>(rows, all_rows)(left, right, depth, at<T>(c), ldc, accumulate, nullptr);
}

template <typename T>
void gemm_panel_of_rows(Address a, int64_t a_row, int64_t a_step, Address b, int64_t b_step, int64_t rows,
                        int64_t depth, Address c, int64_t ldc, bool accumulate) {
  const GemmLeft<T> left{at<T>(a), a_row, a_step};
  const GemmRight<T> right{at<T>(b), b_step};
  gemm_panel(left, right, rows, depth, at<T>(c), ldc, accumulate, at<T>(b));
}

template <typename T>
void bind_gemm(py::module_ module) {
  module.attr("tile_rows") = static_cast<int64_t>(GemmTile<T>::kRows);
  module.attr("tile_columns") = static_cast<int64_t>(GemmTile<T>::kCols);
  module.def("gemm_tile", &gemm_tile_of_rows<T>);
  module.def("gemm_panel", &gemm_panel_of_rows<T>);
}

// ---- loads, stores, transposes: to the type computed in, and back
template <typename From, typename To, typename T>
void bind_copies(py::module_ module) {
  module.def("copy_row", [](Address from, int64_t from_stride, int64_t n, Address to, int64_t to_stride) {
    copy_row<T>(at<const From>(from), from_stride, n, at<To>(to), to_stride);
  });
  module.def("transpose",
             [](Address from, int64_t from_row, int64_t rows, int64_t columns, Address to, int64_t to_row) {
               transpose<T>(at<const From>(from), from_row, rows, columns, at<To>(to), to_row);
             });
}

template <typename Element>
void bind_element(py::module_ module) {
  using T = Compute<Element>;
  bind_copies<Element, T, T>(module.def_submodule("load"));
  bind_copies<T, Element, T>(module.def_submodule("store"));
  module.def("load_pixels", [](Address from, int64_t channel_stride, int64_t pixel_stride, int64_t channels,
                               int64_t pixels, Address to, int64_t pitch) {
    load_pixels(at<const Element>(from), channel_stride, pixel_stride, channels, pixels, at<T>(to), pitch);
  });
  module.def("store_pixels", [](Address from, int64_t pitch, int64_t channels, int64_t pixels, Address to,
                                int64_t channel_stride, int64_t pixel_stride) {
    store_pixels(at<const T>(from), pitch, channels, pixels, at<Element>(to), channel_stride, pixel_stride);
  });
}

// ---- sampling positions, as (low, fraction, inside)
template <typename T>
using Samples = std::vector<std::tuple<T, T, bool>>;

template <typename T>
Samples<T> axis_samples_one_by_one(const std::vector<T>& positions, int64_t size) {
  Samples<T> samples;
  for (const T position : positions) {
    const AxisSample<T> sample = axis_sample(position, size);
    samples.emplace_back(static_cast<T>(sample.low), sample.fraction, sample.inside);
  }
  return samples;
}

template <typename T>
Samples<T> axis_samples_in_vectors(const std::vector<T>& positions, int64_t size) {
  constexpr int64_t kSize = Vec<T>::size();
  const int64_t count = positions.size();
  Samples<T> samples;
  for (int64_t i = 0; i < count; i += kSize) {
    const AxisSamples<T> sample(load<T>(&positions[i], count - i), size);
    T low[kSize], fraction[kSize], inside[kSize];
    sample.low.store(low);
    sample.fraction.store(fraction);
    sample.inside.store(inside);
    for (int64_t j = 0; j < std::min(kSize, count - i); ++j)
      samples.emplace_back(low[j], fraction[j], std::bit_cast<PixelIndex<T>>(inside[j]) != 0);
  }
  return samples;
}

template <typename T>
void bind_sampling(py::module_ module) {
  module.def("axis_samples_one_by_one", &axis_samples_one_by_one<T>);
  module.def("axis_samples_in_vectors", &axis_samples_in_vectors<T>);
}

// ---- how deform_conv2d cuts its work
Layout make_layout(int64_t channels, int64_t groups, int64_t offset_groups, int64_t taps, int64_t height, int64_t width,
                   int64_t vector_size, int64_t threads) {
  DeformConv2dParams params{};
  params.in_channels = channels;
  params.groups = groups;
  params.offset_groups = offset_groups;
  params.kernel_h = 1;
  params.kernel_w = taps;
  params.height = height;
  params.width = width;
  return Layout(params, vector_size, threads);
}

Tiling make_tiling(int64_t out_height, int64_t out_width, int64_t most_pixels) {
  DeformConv2dParams params{};
  params.out_height = out_height;
  params.out_width = out_width;
  return Tiling(params, most_pixels);
}

void bind_layout(py::module_ module) {
  module.attr("DEPTH") = kDepth;
  module.attr("MIN_BLOCK") = kMinBlock;
  module.attr("MAX_TAPS") = kMaxTaps;
  module.attr("TILE_PIXELS") = kTilePixels;
  module.attr("TILE_WIDTH") = kTileWidth;
  py::class_<Layout>(module, "Layout")
      .def(py::init(&make_layout))
      .def_readonly("group_channels", &Layout::group_channels)
      .def_readonly("offset_group_channels", &Layout::offset_group_channels)
      .def_readonly("block_channels", &Layout::block_channels)
      .def_readonly("blocks_per_group", &Layout::blocks_per_group)
      .def_readonly("blocks_per_unit", &Layout::blocks_per_unit)
      .def_readonly("units", &Layout::units)
      .def_readonly("range_taps", &Layout::range_taps)
      .def_readonly("ranges", &Layout::ranges)
      .def_readonly("pitch", &Layout::pitch)
      .def_readonly("plane", &Layout::plane)
      .def_readonly("outside", &Layout::outside);
  py::class_<Block>(module, "Block")
      .def(py::init<const Layout&, int64_t>())
      .def_readonly("channel", &Block::channel)
      .def_readonly("channels", &Block::channels)
      .def_readonly("offset_group", &Block::offset_group);
  py::class_<Unit>(module, "Unit")
      .def(py::init<const Layout&, int64_t>())
      .def_readonly("group", &Unit::group)
      .def_readonly("first_block", &Unit::first_block)
      .def_readonly("last_block", &Unit::last_block)
      .def_readonly("channel", &Unit::channel)
      .def_readonly("channels", &Unit::channels);
  py::class_<TapRange>(module, "TapRange")
      .def(py::init<const Layout&, int64_t>())
      .def_readonly("first", &TapRange::first)
      .def_readonly("count", &TapRange::count);
  py::class_<Tile>(module, "Tile")
      .def_readonly("y", &Tile::y)
      .def_readonly("x", &Tile::x)
      .def_readonly("height", &Tile::height)
      .def_readonly("width", &Tile::width)
      .def("pixels", &Tile::pixels);
  py::class_<Tiling>(module, "Tiling")
      .def(py::init(&make_tiling))
      .def_readonly("count", &Tiling::count)
      .def("pixels", &Tiling::pixels)
      .def("__getitem__", &Tiling::operator[]);
}

}  // namespace

void bind(py::module_ module) {
  const py::module_ float64 = module.def_submodule("float64"), float32 = module.def_submodule("float32");
  bind_gemm<double>(float64);
  bind_gemm<float>(float32);
  bind_sampling<double>(float64);
  bind_sampling<float>(float32);
  bind_element<double>(float64);
  bind_element<float>(float32);
  bind_element<c10::Half>(module.def_submodule("float16"));
  bind_element<c10::BFloat16>(module.def_submodule("bfloat16"));
  bind_layout(module);
}

}  // namespace myvision::CPU_CAPABILITY

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("cpu_capability", [] { return myvision::name_of(myvision::cpu_capability()); });
  myvision::CPU_CAPABILITY::bind(module);
}
