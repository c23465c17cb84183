// deform_conv2d on the CPU: sampling fused with a register-blocked matrix product. Compiled once per instruction set.
//
// Images are copied, a few at a time, to slices of a block of channels each: channels last, in the type computed in,
// with a border of zeros. Then
//   forward   per tile of output pixels, per unit of channels: sample the columns, product += columns x weight;
//   backward  per unit, per tile: column gradient = output gradient x weight^T; scatter it, resample the columns, dot
//             products for the offsets; weight gradient += columns^T x output gradient.
// A unit belongs to one worker in backward, so nothing is atomic and every sum has a fixed order. Only the weight
// gradient (summed over the images) and, where workers share an offset group, the offset and mask gradients (over the
// channels) are kept apart per worker and added up. So the order follows from the shapes and the number of workers,
// and that is one per thread, or a constant where the gradients must not depend on the number of threads.
//
// Per output pixel forward does 2 K C T operations in the product (K output channels, C input channels a group, T taps)
// and 8 C T in the sampling; the product is the limit unless K is small. No buffer grows with the batch.
#include <cstring>
#include <optional>

#include "common/gemm.h"
#include "common/parallel.h"
#include "common/vec_io.h"
#include "common/workspace.h"
#include "ops/deform_conv2d/cpu/deform_conv2d_layout.h"
#include "ops/deform_conv2d/cpu/deform_conv2d_sampling.h"
#include "ops/deform_conv2d/deform_conv2d.h"

namespace myvision::CPU_CAPABILITY::deform_conv2d {
namespace {

constexpr int64_t kImageBytes = int64_t(12) << 20;  // of slices or output gradients held at a time, if an image fits
constexpr int64_t kProductDepth = 256;              // rows of a packed panel multiplied at a time: they stay in L1
constexpr int64_t kSerialOperations = int64_t(1) << 18;  // fewer are not worth waking threads for
constexpr int64_t kDeterministicWorkers = 8;  // gradients are summed as by so many, whatever the number of threads

// What forward and backward share. In is the type in memory (that of the offset may be T), T the one computed in.
template <typename In, typename T = Compute<In>>
struct Common {
  static constexpr int64_t kVector = Vec<T>::size();
  static constexpr int64_t kPanel = GemmTile<T>::kCols;

  const DeformConv2dParams& p;
  const Layout l;
  const int64_t workers;
  const Tiling tiling;
  const int64_t group_outputs, panels;      // output channels of a group, and the panels they fill
  const int64_t unit_columns, columns_row;  // most columns of a unit in one range of taps, and their pitch in a tile
  const int64_t weight_range, weight_unit;  // elements of the packed weight of a range, of a unit

  Common(const DeformConv2dParams& params, int64_t units_wanted, int64_t most_workers)
      : p(params),
        l(params, kVector, units_wanted),
        workers(most_workers),
        tiling(params, tile_pixels(params, workers)),
        group_outputs(params.out_channels / params.groups),
        panels(ceil_div(group_outputs, kPanel)),
        unit_columns(l.blocks_per_unit * l.block_channels * l.range_taps),
        columns_row(padded_row(round_up(unit_columns, kPanel) + kVector)),
        weight_range(panels * kPanel * unit_columns),
        weight_unit(weight_range * l.ranges) {}

  static int64_t worthwhile_workers(const DeformConv2dParams& p, int64_t most) {
    const double operations = double(p.batch) * p.out_height * p.out_width * p.out_channels *
                              (p.in_channels / p.groups) * (p.kernel_h * p.kernel_w);
    return operations < kSerialOperations ? 1 : most;
  }
  static int64_t tile_pixels(const DeformConv2dParams& p, int64_t workers) {
    const int64_t share = ceil_div(std::max(p.batch, int64_t(1)) * p.out_height * p.out_width, workers);
    return std::min(std::max(share, int64_t(32)), kTilePixels);
  }

  static const In* at(const Strided4& tensor, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
    return element<const In>(tensor, i0, i1, i2, i3);
  }
  static In* out(const Strided4& tensor, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
    return element<In>(tensor, i0, i1, i2, i3);
  }

  // ---- slices
  void load_slice(int64_t image, const Block& block, T* slice) const {
    const int64_t row = l.pitch * l.block_channels;
    std::memset(slice, 0, row * sizeof(T));
    std::memset(slice + (p.height + 1) * row, 0, 2 * row * sizeof(T));
    for (int64_t y = 0; y < p.height; ++y) {
      T* to = slice + (y + 1) * row;
      std::memset(to, 0, l.block_channels * sizeof(T));
      std::memset(to + (p.width + 1) * l.block_channels, 0, l.block_channels * sizeof(T));
      load_pixels(at(p.input, image, block.channel, y), p.input.stride[1], p.input.stride[3], block.channels, p.width,
                  to + l.block_channels, l.block_channels);
    }
  }
  void store_slice(const T* slice, int64_t image, const Block& block, const Strided4& to) const {
    for (int64_t y = 0; y < p.height; ++y)
      store_pixels(slice + ((y + 1) * l.pitch + 1) * l.block_channels, l.block_channels, block.channels, p.width,
                   out(to, image, block.channel, y), to.stride[1], to.stride[3]);
  }

  // ---- weights
  // Packed, a unit's weight stands as [range of taps][panel of outputs][unit_columns][kPanel outputs].
  T* packed_range(T* packed, const Unit& unit, int64_t range) const {
    return packed + unit.index * weight_unit + range * weight_range;
  }

  // Strides of a weight's columns. Packing takes them in the order of memory: [channel][tap], or [tap][channel] as in
  // channels_last.
  struct ColumnOrder {
    int64_t channel, tap;
    bool by_tap() const { return tap != 1; }
  };
  ColumnOrder contiguous_order() const { return {l.taps, 1}; }
  // The order of the weight's columns where it can be packed as it is.
  std::optional<ColumnOrder> column_order(const Strided4& weight) const {
    const int64_t channel = weight.stride[1], tap = p.kernel_w > 1 ? weight.stride[3] : weight.stride[2];
    if (p.kernel_h > 1 && p.kernel_w > 1 && weight.stride[2] != p.kernel_w * tap) return std::nullopt;
    if ((l.taps == 1 || tap == 1) && (l.group_channels == 1 || channel == l.taps)) return contiguous_order();
    if (tap != 1 && channel == 1) return ColumnOrder{channel, tap};
    return std::nullopt;
  }
  // Copies a weight of any strides to a contiguous one (PACK), or back.
  template <bool PACK>
  void copy_weight(const Strided4& weight, T* contiguous) const {
    parallel_tasks(workers, p.out_channels, [&](int64_t k, int64_t) {
      T* copy = contiguous + k * l.group_channels * l.taps;
      for (int64_t c = 0; c < l.group_channels; ++c)
        for (int64_t y = 0; y < p.kernel_h; ++y, copy += p.kernel_w) {
          In* row = out(weight, k, c, y);
          if constexpr (PACK)
            copy_row<T>(row, weight.stride[3], p.kernel_w, copy, 1);
          else
            copy_row<T>(copy, 1, p.kernel_w, row, weight.stride[3]);
        }
    });
  }

  // Packs a unit's weight (PACK), or unpacks its gradient; output channels are outputs_row apart.
  template <bool PACK, typename W>
  void convert_weight(const Unit& unit, W* weight, int64_t outputs_row, const ColumnOrder& order, T* packed) const {
    const Workspace places(l.block_channels * l.taps * sizeof(T*));
    for (int64_t b = unit.first_block; b < unit.last_block; ++b) {
      const Block block(l, b);
      find_places(unit, block, order, packed, places.as<T*>());
      W* rows = weight + unit.group * group_outputs * outputs_row + block.channel % l.group_channels * order.channel;
      const int64_t runs = order.by_tap() ? l.taps : 1, run = block.channels * l.taps / runs;  // of memory
      for (int64_t k = 0; k < panels * kPanel; k += kVector) {
        const int64_t shift = k / kPanel * unit_columns * kPanel + k % kPanel;
        const int64_t outputs = std::clamp(group_outputs - k, int64_t(0), kVector);
        for (int64_t r = 0; r < runs; ++r)
          for (int64_t j = 0; j < run; j += kVector)
            convert_square<PACK>(rows + k * outputs_row + r * order.tap + j, outputs_row, outputs,
                                 std::min(kVector, run - j), places.as<T*>() + r * run + j, shift);
      }
    }
  }
  // Where the columns of a block, in the order of memory, stand in the packed weight: [tap][channel] in each range.
  void find_places(const Unit& unit, const Block& block, const ColumnOrder& order, T* packed, T** places) const {
    const ColumnOrder at = order.by_tap() ? ColumnOrder{1, block.channels} : contiguous_order();
    for (int64_t range = 0; range < l.ranges; ++range) {
      const TapRange taps(l, range);
      T* place = packed_range(packed, unit, range) + (block.channel - unit.channel) * taps.count * kPanel;
      for (int64_t t = 0; t < taps.count; ++t)
        for (int64_t c = 0; c < block.channels; ++c, place += kPanel)
          places[c * at.channel + (taps.first + t) * at.tap] = place;
    }
  }
  // Packs or unpacks a square: kVector output channels, of which m exist, by n columns.
  template <bool PACK, typename W>
  static void convert_square(W* weight, int64_t outputs_row, int64_t m, int64_t n, T* const* places, int64_t shift) {
    Vec<T> square[kVector];
    if constexpr (PACK) {
#pragma GCC unroll 16
      for (int r = 0; r < kVector; ++r) square[r] = r < m ? load<T>(weight + r * outputs_row, n) : Vec<T>(T(0));
      transpose<T>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kVector; ++i)
        if (i < n) square[i].store(places[i] + shift);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kVector; ++i) square[i] = i < n ? Vec<T>::loadu(places[i] + shift) : Vec<T>(T(0));
      transpose<T>(square);
#pragma GCC unroll 16
      for (int r = 0; r < kVector; ++r)
        if (r < m) store(square[r], weight + r * outputs_row, n);
    }
  }

  // Packs every unit's weight.
  void pack_weight(T* packed) const {
    const auto pack = [&](const auto* weight, int64_t row, const ColumnOrder& order) {
      parallel_tasks(workers, l.units,
                     [&](int64_t unit, int64_t) { convert_weight<true>(Unit(l, unit), weight, row, order, packed); });
    };
    if (const auto order = column_order(p.weight)) return pack(at(p.weight, 0), p.weight.stride[0], *order);
    const int64_t row = l.group_channels * l.taps;
    const Workspace copy(p.out_channels * row * sizeof(T));
    copy_weight<true>(p.weight, copy.as<T>());
    pack(static_cast<const T*>(copy.as<T>()), row, contiguous_order());
  }

  // ---- sampling
  void plan_block(int64_t image, const Block& block, const Tile& tile, const TapRange& taps, T* plan) const {
    make_plan<In>(p, l, image, block.offset_group, tile, taps, plan);
  }
  void sample_block(const T* plan, const T* slice, const Unit& unit, const Block& block, const Tile& tile,
                    const TapRange& taps, T* columns) const {
    with_vectors<T>(block.channels, [&](auto vector, auto vectors) {
      sample<typename decltype(vector)::type, vectors.value>(
          plan, slice, l.block_channels, l.pitch, tile, taps.count, block.channels,
          columns + (block.channel - unit.channel) * taps.count, columns_row);
    });
  }
};

// ------------------------------------------------------------------------------------------------ forward
template <typename In, typename T = Compute<In>>
struct Forward : Common<In, T> {
  using Base = Common<In, T>;
  using Base::kPanel, Base::kVector, Base::l, Base::p, Base::tiling, Base::workers;

  const int64_t product_row = padded_row(Base::panels * kPanel);
  const int64_t images = std::clamp(kImageBytes / int64_t(l.blocks(p) * l.slice() * sizeof(T)), int64_t(1), p.batch);

  struct Scratch {
    T *plan, *columns, *product;
  };
  Scratch carve_scratch(Carver& memory) const {
    return {memory.take<T>(l.range_taps * kPlanTap), memory.take<T>(tiling.pixels() * Base::columns_row),
            memory.take<T>(tiling.pixels() * product_row)};
  }
  const int64_t scratch_bytes = bytes_of([this](Carver& memory) { carve_scratch(memory); });

  struct Memory {
    T *slices, *packed, *bias;
    char* scratches;  // a Scratch of each worker
  };
  Memory carve_memory(Carver& memory) const {
    return {memory.take<T>(images * l.blocks(p) * l.slice()), memory.take<T>(l.units * Base::weight_unit),
            memory.take<T>(p.groups * product_row), memory.take<char>(workers * scratch_bytes)};
  }
  const Workspace workspace{bytes_of([this](Carver& memory) { carve_memory(memory); })};
  const Memory memory = workspace.carve([this](Carver& memory) { return carve_memory(memory); });

  explicit Forward(const DeformConv2dParams& params)
      : Base(params, 1, Base::worthwhile_workers(params, num_threads())) {}

  void run() {
    load_bias();
    Base::pack_weight(memory.packed);
    const int64_t blocks = l.blocks(p);
    for (int64_t first = 0; first < p.batch; first += images) {
      const int64_t count = std::min(images, p.batch - first);
      parallel_tasks(workers, count * blocks, [&](int64_t i, int64_t) {
        Base::load_slice(first + i / blocks, Block(l, i % blocks), memory.slices + i * l.slice());
      });
      parallel_tasks(workers, count * tiling.count, [&](int64_t i, int64_t worker) {
        const int64_t n = i / tiling.count;
        run_tile(first + n, memory.slices + n * blocks * l.slice(), tiling[i % tiling.count], scratch(worker));
      });
    }
  }

  void load_bias() {
    std::memset(memory.bias, 0, p.groups * product_row * sizeof(T));
    if (!p.bias.data) return;
    for (int64_t g = 0; g < p.groups; ++g)
      copy_row<T>(Base::at(p.bias, g * Base::group_outputs), p.bias.stride[0], Base::group_outputs,
                  memory.bias + g * product_row, 1);
  }

  Scratch scratch(int64_t worker) const {
    Carver own(memory.scratches + worker * scratch_bytes);
    return carve_scratch(own);
  }
  void run_tile(int64_t image, const T* image_slices, const Tile& tile, const Scratch& own) const {
    const auto [plan, columns, product] = own;
    int64_t planned = -1;  // the offset group and range of taps in the plan
    for (int64_t g = 0; g < p.groups; ++g) {
      for (int64_t q = 0; q < tile.pixels(); ++q)
        std::memcpy(product + q * product_row, memory.bias + g * product_row, product_row * sizeof(T));
      for (int64_t u = g * l.units_per_group; u < (g + 1) * l.units_per_group; ++u) {
        const Unit unit(l, u);
        for (int64_t range = 0; range < l.ranges; ++range) {
          const TapRange taps(l, range);
          for (int64_t b = unit.first_block; b < unit.last_block; ++b) {
            const Block block(l, b);
            if (planned != block.offset_group * l.ranges + range) {
              planned = block.offset_group * l.ranges + range;
              Base::plan_block(image, block, tile, taps, plan);
            }
            Base::sample_block(plan, image_slices + b * l.slice(), unit, block, tile, taps, columns);
          }
          multiply(unit, range, unit.channels * taps.count, tile.pixels(), columns, product);
        }
      }
      store_tile(product, image, g, tile);
    }
  }

  void multiply(const Unit& unit, int64_t range, int64_t depth, int64_t pixels, const T* columns, T* product) const {
    const T* weight = Base::packed_range(memory.packed, unit, range);
    for (int64_t panel = 0; panel < Base::panels; ++panel, weight += Base::unit_columns * kPanel)
      gemm_panel<T>({columns, Base::columns_row, 1}, {weight, kPanel}, pixels, depth, product + panel * kPanel,
                    product_row, true, weight + Base::unit_columns * kPanel);
  }

  void store_tile(const T* product, int64_t image, int64_t group, const Tile& tile) const {
    for (int64_t k = 0; k < Base::group_outputs; k += kVector)
      for (int64_t y = 0; y < tile.height; ++y) {
        In* to = Base::out(p.output, image, group * Base::group_outputs + k, tile.y + y, tile.x);
        for (int64_t i = kVector; i < 2 * kVector; ++i) __builtin_prefetch(to + i * p.output.stride[1], 1);
        store_pixels(product + y * product_row + k, tile.height * product_row,
                     std::min(kVector, Base::group_outputs - k), tile.width, to, p.output.stride[1],
                     p.output.stride[3]);
      }
  }
};

// ------------------------------------------------------------------------------------------------ backward
template <typename In, typename T = Compute<In>>
struct Backward : Common<In, T> {
  using Base = Common<In, T>;
  using Base::kPanel, Base::kVector, Base::l, Base::p, Base::tiling, Base::workers;

  const DeformConv2dGradients& grad;
  const bool want_offsets = grad.offset.data || grad.mask.data;
  const bool want_columns = grad.input.data || want_offsets;  // the gradient of the columns

  // Workers form a grid: shares of the units times shares of the images.
  const int64_t grad_row = padded_row(p.out_channels + kPanel);
  const int64_t grad_image = tiling.count * tiling.pixels() * grad_row;
  const int64_t images =
      std::clamp(kImageBytes / int64_t(grad_image * sizeof(T)), int64_t(1), std::max(p.batch, int64_t(1)));
  const int64_t unit_shares = std::min(workers, l.units);
  const int64_t image_shares = std::clamp(workers / unit_shares, int64_t(1), images);
  const int64_t offset_shares = shares_meet_in_an_offset_group() ? unit_shares : 1;

  const int64_t packed_size = round_up(Base::unit_columns, kPanel) * Base::group_outputs;  // of a unit and range
  const int64_t unit_slices = l.blocks_per_unit * l.slice() + kVector;
  const int64_t out_image = p.out_height * p.out_width;
  const int64_t offsets_image = p.offset_groups * l.taps * 3 * out_image;
  const int64_t offsets_size = want_offsets ? images * offsets_image : 0;          // of each of the offset_shares
  const int64_t weight_size = grad.weight.data ? l.units * Base::weight_unit : 0;  // of each share of the images

  struct Scratch {
    T *plan, *columns, *slices, *grad_slices;
  };
  Scratch carve_scratch(Carver& memory) const {
    return {memory.take<T>(l.range_taps * kPlanTap), memory.take<T>(tiling.pixels() * Base::columns_row),
            memory.take<T>(unit_slices), memory.take<T>(unit_slices)};
  }
  const int64_t scratch_bytes = bytes_of([this](Carver& memory) { carve_scratch(memory); });

  struct Memory {
    T* gradients;  // [image][tile][pixel][channel]
    T *packed, *weight_sums;
    char* scratches;  // a Scratch of each worker
    T *offset_sums, *bias_sums, *bias_total;
  };
  Memory carve_memory(Carver& memory) const {
    return {memory.take<T>(images * grad_image),
            memory.take<T>(want_columns ? l.units * l.ranges * packed_size : 0),
            memory.take<T>(image_shares * weight_size),
            memory.take<char>(unit_shares * image_shares * scratch_bytes),
            memory.take<T>(offset_shares * offsets_size),
            memory.take<T>(images * tiling.count * p.out_channels),
            memory.take<T>(p.out_channels)};
  }
  const Workspace workspace{bytes_of([this](Carver& memory) { carve_memory(memory); })};
  const Memory memory = workspace.carve([this](Carver& memory) { return carve_memory(memory); });

  Backward(const DeformConv2dParams& params, const DeformConv2dGradients& gradients, int64_t most_workers)
      : Base(params, most_workers, most_workers), grad(gradients) {}

  void run() {
    if (want_columns) pack_transposed_weight();
    if (grad.weight.data) clear(memory.weight_sums, image_shares * weight_size);
    std::fill_n(memory.bias_total, p.out_channels, T(0));
    for (int64_t first = 0; first < p.batch; first += images) {
      const int64_t count = std::min(images, p.batch - first);
      parallel_tasks(workers, count * tiling.count, [&](int64_t i, int64_t) { load_tile(first, i); });
      if (grad.bias.data) add_bias(count * tiling.count);
      if (want_offsets) clear(memory.offset_sums, offset_shares * offsets_size);
      if (want_columns || grad.weight.data) run_units(first, count);
      if (want_offsets) store_offsets(first, count);
    }
    if (grad.weight.data) store_weight();
    if (grad.bias.data) copy_row<T>(memory.bias_total, 1, p.out_channels, Base::out(grad.bias, 0), grad.bias.stride[0]);
  }

  static void clear(T* sums, int64_t count) {
    parallel_for(0, count, 1 << 16,
                 [&](int64_t first, int64_t last) { std::memset(sums + first, 0, (last - first) * sizeof(T)); });
  }

  // ---- the gradient of the output, and of the bias
  T* tile_gradient(int64_t image, int64_t tile) const {
    return memory.gradients + (image * tiling.count + tile) * tiling.pixels() * grad_row;
  }
  void load_tile(int64_t first, int64_t i) const {
    const int64_t image = i / tiling.count;
    const Tile tile = tiling[i % tiling.count];
    T* to = tile_gradient(image, i % tiling.count);
    for (int64_t y = 0; y < tile.height; ++y)
      load_pixels(Base::at(p.output, first + image, 0, tile.y + y, tile.x), p.output.stride[1], p.output.stride[3],
                  p.out_channels, tile.width, to + y * grad_row, tile.height * grad_row);
    if (!grad.bias.data) return;
    T* sum = memory.bias_sums + i * p.out_channels;
    std::fill_n(sum, p.out_channels, T(0));
    for (int64_t q = 0; q < tile.pixels(); ++q)
      for (int64_t k = 0; k < p.out_channels; ++k) sum[k] += to[q * grad_row + k];
  }
  void add_bias(int64_t tiles) const {
    for (int64_t i = 0; i < tiles; ++i)
      for (int64_t k = 0; k < p.out_channels; ++k) memory.bias_total[k] += memory.bias_sums[i * p.out_channels + k];
  }

  // ---- weight^T in panels of columns: [unit][range][panel][output][kPanel columns]
  T* packed_columns(const Unit& unit, int64_t range) const {
    return memory.packed + (unit.index * l.ranges + range) * packed_size;
  }
  void pack_transposed_weight() const {
    const Workspace by_outputs(l.units * Base::weight_unit * sizeof(T));
    Base::pack_weight(by_outputs.template as<T>());
    parallel_tasks(workers, l.units * l.ranges, [&](int64_t i, int64_t) {
      const Unit unit(l, i / l.ranges);
      const int64_t range = i % l.ranges;
      turn_panels(Base::packed_range(by_outputs.template as<T>(), unit, range),
                  unit.channels * TapRange(l, range).count, packed_columns(unit, range));
    });
  }
  void turn_panels(const T* by_outputs, int64_t columns, T* to) const {
    const int64_t outputs = Base::group_outputs;
    std::memset(to, 0, round_up(columns, kPanel) * outputs * sizeof(T));
    for (int64_t k = 0; k < outputs; k += kPanel)
      for (int64_t j = 0; j < columns; j += kPanel)
        transpose<T>(by_outputs + (k / kPanel * Base::unit_columns + j) * kPanel, kPanel, std::min(kPanel, columns - j),
                     std::min(kPanel, outputs - k), to + (j / kPanel * outputs + k) * kPanel, kPanel);
  }

  // ---- the work
  Scratch scratch(int64_t worker) const {
    Carver own(memory.scratches + worker * scratch_bytes);
    return carve_scratch(own);
  }
  int64_t first_unit(int64_t share) const { return share * l.units / unit_shares; }
  // Whether some offset group has channels in two shares, which then need sums of their own.
  bool shares_meet_in_an_offset_group() const {
    const auto offset_group = [&](int64_t block) { return Block(l, block).offset_group; };
    for (int64_t i = 1; i < unit_shares; ++i) {
      const Unit before(l, first_unit(i) - 1), after(l, first_unit(i));
      if (offset_group(before.last_block - 1) == offset_group(after.first_block)) return true;
    }
    return false;
  }
  void run_units(int64_t first, int64_t count) const {
    parallel_for(0, unit_shares * image_shares, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        const int64_t i = worker % unit_shares, j = worker / unit_shares;
        const Scratch own = scratch(worker);
        for (int64_t u = first_unit(i); u < first_unit(i + 1); ++u)
          for (int64_t n = j * count / image_shares; n < (j + 1) * count / image_shares; ++n)
            run_unit(Unit(l, u), first + n, n,
                     memory.offset_sums + i % offset_shares * offsets_size + n * offsets_image,
                     memory.weight_sums + j * weight_size, own);
      }
    });
  }

  void run_unit(const Unit& unit, int64_t image, int64_t n, T* offsets, T* weights, const Scratch& own) const {
    const auto [plan, columns, slices, grad_slices] = own;
    for (int64_t b = unit.first_block; b < unit.last_block; ++b)
      Base::load_slice(image, Block(l, b), slices + (b - unit.first_block) * l.slice());
    if (grad.input.data) std::memset(grad_slices, 0, unit_slices * sizeof(T));
    for (int64_t i = 0; i < tiling.count; ++i) {
      const Tile tile = tiling[i];
      const T* gradient = tile_gradient(n, i) + unit.group * Base::group_outputs;
      for (int64_t range = 0; range < l.ranges; ++range) {
        const TapRange taps(l, range);
        const int64_t depth = unit.channels * taps.count;
        if (want_columns) multiply_columns(gradient, packed_columns(unit, range), tile.pixels(), depth, columns);
        for (int64_t b = unit.first_block; b < unit.last_block; ++b) {
          const Block block(l, b);
          const int64_t at = (b - unit.first_block) * l.slice();
          Base::plan_block(image, block, tile, taps, plan);
          if (!want_columns) {
            Base::sample_block(plan, slices + at, unit, block, tile, taps, columns);
            continue;
          }
          sample_block_backward(plan, slices + at, grad_slices + at, unit, block, tile, taps, columns);
          if (want_offsets)
            add_offset_gradients(plan, tile, taps, p.out_height, p.out_width,
                                 offsets + block.offset_group * l.taps * 3 * out_image);
        }
        if (grad.weight.data)
          multiply_weight(columns, gradient, tile.pixels(), depth, Base::packed_range(weights, unit, range));
      }
    }
    if (!grad.input.data) return;
    for (int64_t b = unit.first_block; b < unit.last_block; ++b)
      Base::store_slice(grad_slices + (b - unit.first_block) * l.slice(), image, Block(l, b), grad.input);
  }

  void sample_block_backward(T* plan, const T* slice, T* grad_slice, const Unit& unit, const Block& block,
                             const Tile& tile, const TapRange& taps, T* columns) const {
    const auto go = [&](auto vector, auto vectors, auto input, auto weight) {
      sample_backward<typename decltype(vector)::type, vectors.value, input.value, weight.value>(
          plan, slice, grad_slice, l.block_channels, l.pitch, tile, taps.count, block.channels,
          columns + (block.channel - unit.channel) * taps.count, Base::columns_row);
    };
    with_vectors<T>(block.channels, [&](auto vector, auto vectors) {
      if (grad.input.data && grad.weight.data)
        go(vector, vectors, std::true_type(), std::true_type());
      else if (grad.input.data)
        go(vector, vectors, std::true_type(), std::false_type());
      else if (grad.weight.data)
        go(vector, vectors, std::false_type(), std::true_type());
      else
        go(vector, vectors, std::false_type(), std::false_type());
    });
  }

  // columns = gradient x weight^T
  void multiply_columns(const T* gradient, const T* weight, int64_t pixels, int64_t depth, T* columns) const {
    const int64_t outputs = Base::group_outputs;
    for (int64_t k = 0; k < outputs; k += kProductDepth)
      for (int64_t j = 0; j < depth; j += kPanel) {
        const T* panel = weight + (j / kPanel * outputs + k) * kPanel;
        gemm_panel<T>({gradient + k, grad_row, 1}, {panel, kPanel}, pixels, std::min(kProductDepth, outputs - k),
                      columns + j, Base::columns_row, k > 0, panel + outputs * kPanel);
      }
  }

  // sums += columns^T x gradient; outputs past the group's are the next group's and fall on padding
  void multiply_weight(const T* columns, const T* gradient, int64_t pixels, int64_t depth, T* sums) const {
    for (int64_t panel = 0; panel < Base::panels; ++panel)
      gemm_panel<T>({columns, 1, Base::columns_row}, {gradient + panel * kPanel, grad_row}, depth, pixels,
                    sums + panel * Base::unit_columns * kPanel, kPanel, true, gradient + (panel + 1) * kPanel);
  }

  // ---- sums of the workers -> gradients
  static void add_shares(T* sums, int64_t shares, int64_t size, int64_t first, int64_t last) {
    for (int64_t share = 1; share < shares; ++share)
      for (int64_t i = first; i < last; ++i) sums[i] += sums[share * size + i];
  }

  void store_offsets(int64_t first, int64_t count) const {
    const int64_t per_image = p.offset_groups * l.taps;
    parallel_tasks(workers, count * per_image, [&](int64_t i, int64_t) {
      const int64_t n = i / per_image, tap = i % per_image;
      T* sums = memory.offset_sums + n * offsets_image + tap * 3 * out_image;
      add_shares(sums, offset_shares, offsets_size, 0, 3 * out_image);
      with_offset_type<In, T>(p, [&](auto* type) {
        store_plane(sums, type, grad.offset, first + n, 2 * tap);
        store_plane(sums + out_image, type, grad.offset, first + n, 2 * tap + 1);
      });
      store_plane(sums + 2 * out_image, static_cast<In*>(nullptr), grad.mask, first + n, tap);
    });
  }
  template <typename Out>
  void store_plane(const T* sums, Out*, const Strided4& to, int64_t image, int64_t channel) const {
    if (!to.data) return;
    for (int64_t y = 0; y < p.out_height; ++y)
      copy_row<T>(sums + y * p.out_width, 1, p.out_width, element<Out>(to, image, channel, y), to.stride[3]);
  }

  void store_weight() const {
    T* sums = memory.weight_sums;
    parallel_for(0, weight_size, 1 << 14,
                 [&](int64_t first, int64_t last) { add_shares(sums, image_shares, weight_size, first, last); });
    if (const auto order = Base::column_order(grad.weight))
      return unpack_weight(Base::out(grad.weight, 0), grad.weight.stride[0], *order);
    const int64_t row = l.group_channels * l.taps;
    const Workspace contiguous(p.out_channels * row * sizeof(T));
    unpack_weight(contiguous.template as<T>(), row, Base::contiguous_order());
    Base::template copy_weight<false>(grad.weight, contiguous.template as<T>());
  }
  template <typename W>
  void unpack_weight(W* weight, int64_t row, const typename Base::ColumnOrder& order) const {
    parallel_tasks(workers, l.units, [&](int64_t unit, int64_t) {
      Base::template convert_weight<false>(Unit(l, unit), weight, row, order, memory.weight_sums);
    });
  }
};

}  // namespace

void forward(const DeformConv2dParams& params) {
  with_type(params.dtype, [&]<typename In>(In*) { Forward<In>(params).run(); });
}

void backward(const DeformConv2dParams& params, const DeformConv2dGradients& gradients) {
  with_type(params.dtype, [&]<typename In>(In*) {
    const int64_t most = gradients.deterministic ? kDeterministicWorkers : num_threads();
    Backward<In>(params, gradients, Common<In>::worthwhile_workers(params, most)).run();
  });
}

}  // namespace myvision::CPU_CAPABILITY::deform_conv2d
