// batch_norm on the CPU, compiled once per instruction set.
//
// Forward reads the input for its moments and again to normalise it, backward reads gradient, input and residual for
// their sums and again for the input gradient. Along planes (NCHW) a few channels are done from beginning to end before
// the next, so that the second reading finds them in the cache and memory moves each number once. Across channels
// (channels_last) all of the first reading comes first, and the second goes backwards. Where a residual gradient is
// wanted, the first reading writes it and the second reads it in place of what it was made of.
#include "common/extremes.h"
#include "common/workspace.h"
#include "ops/batch_norm/cpu/batch_norm_lines.h"
#include "ops/batch_norm/cpu/batch_norm_partition.h"

namespace myvision::CPU_CAPABILITY::batch_norm {
namespace {

// Numbers of a tensor at a time: a few thousand bytes, so that those of all tensors stay in L1.
template <typename T>
constexpr int64_t kBlock = ColumnMoments<T>::kColumns;

// Lines across channels that are worth having in a block: sums and coefficients are read once for several.
constexpr int64_t kLinesAtOnce = 16;

bool merges_batch(const Strided4& tensor, int64_t width) {
  return tensor.data == nullptr || width == 1 || tensor.stride[0] == width * tensor.stride[3];
}

// Where every image follows the one before, the batch is one row of pixels.
template <typename... Tensors>
void merge_batch(BatchNormParams& p, Tensors&... tensors) {
  if (p.groups != 0 || p.height != 1 || !(merges_batch(tensors, p.width) && ...)) return;
  if (p.width == 1) ((tensors.stride[3] = tensors.stride[0]), ...);
  p.width *= p.batch;
  p.batch = 1;
}

// How lines lie in the tensors of a call.
struct Layout {
  bool along;     // a line runs through pixels rather than channels, as most of input's neighbours do
  bool in_place;  // all lines lie side by side
  bool crossed;   // some tensor's neighbours are those of other lines
  bool buffered;  // lines, or what goes into the activation, are brought into buffers
};

template <typename... Tensors>
Layout layout_of(const BatchNormParams& p, const Tensors&... tensors) {
  const int64_t channel = p.input.stride[1], pixel = p.input.stride[3];
  const bool along = p.width > 1 && (p.channels == 1 || pixel == 1 || (channel != 1 && pixel <= channel));
  const auto step = [&](const Strided4& tensor) { return tensor.stride[along ? 3 : 1]; };
  const auto crossed = [&](const Strided4& tensor) { return step(tensor) != 1 && tensor.stride[along ? 1 : 3] == 1; };
  const bool in_place = ((tensors.data == nullptr || step(tensors) == 1) && ...);
  return {along, in_place, ((tensors.data != nullptr && crossed(tensors)) || ...),
          !in_place || !is_in_loops(p.activation.kind)};
}

// Forward and backward share this base. S is the type that lines are used in, T the one computed in.
template <typename S, typename T = Compute<S>>
class Kernel {
 protected:
  Kernel(const BatchNormParams& params, const Layout& layout, bool once)
      : p(params),
        along(layout.along),
        partition({p.batch, p.channels, p.height, p.width}, p.groups, along, layout.crossed, once, kBlock<T>,
                  along || layout.buffered ? 1 : kLinesAtOnce),
        input(view(p.input)),
        residual(view(p.residual)),
        coefficients_(kArrays * partition.slices() * p.channels * sizeof(T)) {}

  LineView<S> view(const Strided4& tensor) const { return {tensor, p.dtype, along ? 1 : 3, along ? 3 : 1}; }
  int64_t lines(const Block& block) const { return along ? block.channels : block.pixels; }
  int64_t in_line(const Block& block) const { return along ? block.pixels : block.channels; }
  static int64_t offset(const LineView<S>& tensor, const Block& b) {
    return tensor.offset(b.image, b.channel, b.y, b.x);
  }
  Lines<const S> read(const LineView<S>& tensor, const Block& block, S* buffer) const {
    if (!tensor.is_given()) return {nullptr, 0};
    return tensor.read(offset(tensor, block), lines(block), in_line(block), buffer);
  }
  Lines<S> write(const LineView<S>& tensor, const Block& block, S* buffer) const {
    if (!tensor.is_given()) return {nullptr, 0};
    return tensor.write(offset(tensor, block), in_line(block), buffer);
  }
  void finish(const LineView<S>& tensor, const Block& block, const S* buffer) const {
    if (tensor.is_given()) tensor.finish(offset(tensor, block), lines(block), in_line(block), buffer);
  }
  // Calls body(std::bool_constant<along>()), so that the inner loops know the direction.
  template <typename Body>
  void with_direction(const Body& body) const {
    along ? body(std::true_type()) : body(std::false_type());
  }

  // All numbers of some channels of a slice.
  Tile whole(int64_t slice, int64_t channel, int64_t channels) const {
    return {0, 0, slice, channel, channels, 0, partition.slice_pixels()};
  }

  // ---- statistics: small work that is called from several places, and inlined there would be compiled for each
  int64_t groups() const { return p.channels / partition.group_channels(); }  // of a slice
  T* statistics() const { return static_cast<T*>(p.statistics); }
  Statistics<T> statistics_of_group(int64_t group) const {
    const int64_t all = partition.slices() * groups();
    return {statistics()[group], statistics()[all + group], statistics()[2 * all + group]};
  }
  void write_statistics(int64_t group, const Statistics<T>& s) const {
    if (statistics() == nullptr) return;
    const int64_t all = partition.slices() * groups();
    statistics()[group] = s.mean;
    statistics()[all + group] = s.rest;
    statistics()[2 * all + group] = s.rstd;
  }

  double weight(int64_t channel) const { return p.weight ? static_cast<const T*>(p.weight)[channel] : 1; }
  double bias(int64_t channel) const { return p.bias ? static_cast<const T*>(p.bias)[channel] : 0; }

  // Calls body(group of all, its first channel, the index of that among the channels of all slices).
  template <typename Body>
  void for_each_group(int64_t unit, const Body& body) const {
    const Tile tile = partition.tile(unit, 0);
    for (int64_t channel = tile.channel; channel < tile.channel + tile.channels; channel += partition.group_channels())
      body(tile.slice * groups() + channel / partition.group_channels(), channel, tile.slice * p.channels + channel);
  }

  // ---- coefficients: arrays of a number for each channel of each slice
  enum Array { kMean, kScale, kShift, kInputScale, kInputShift, kInputFactor, kArrays };
  T* array(Array which, int64_t index = 0) const {
    return coefficients_.template as<T>() + which * partition.slices() * p.channels + index;
  }
  int64_t index(const Block& block) const { return (p.groups == 0 ? 0 : block.image) * p.channels + block.channel; }
  int64_t index(const Tile& tile) const { return tile.slice * p.channels + tile.channel; }

  // Normalised = (input - mean) * scale + shift
  [[gnu::noinline]] void set_scale(int64_t first_channel, int64_t index, const Statistics<T>& s) const {
    for (int64_t i = 0; i < partition.group_channels(); ++i) {
      const double scale = weight(first_channel + i) * s.rstd;
      *array(kMean, index + i) = s.mean;
      *array(kScale, index + i) = static_cast<T>(scale);
      *array(kShift, index + i) = static_cast<T>(bias(first_channel + i) - s.rest * scale);
    }
  }
  void set_scale_from_statistics(int64_t unit) const {
    for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      set_scale(channel, index, statistics_of_group(group));
    });
  }
  NormLines<S> norm_lines(const Block& block, Lines<const S> x, S* residual_buffer) const {
    const Affine<T> channels{array(kMean), array(kScale), array(kShift)};
    return {x, read(residual, block, residual_buffer), channels + index(block), lines(block), in_line(block)};
  }

  const BatchNormParams& p;
  const bool along;
  const Partition partition;
  const LineView<S> input, residual;

 private:
  Workspace coefficients_;
};

// ------------------------------------------------------------------------------------------------ forward
template <typename S>
class Forward : Kernel<S> {
  using Base = Kernel<S>;
  using T = Compute<S>;
  using Base::along;
  using Base::input;
  using Base::p;
  using Base::partition;

 public:
  Forward(const BatchNormParams& params, const Layout& layout)
      : Base(params, layout, params.statistics_from != StatisticsFrom::Input || params.output.data == nullptr),
        output_(Base::view(p.output)),
        moments_(partition.parts() * partition.slices() * p.channels * sizeof(Moments)) {}

  void run() {
    const auto normalise = [&](const Tile& tile) { this->normalise(tile); };
    const auto find = [&](const Tile& tile) { find_moments(tile); };
    const auto merge = [&](int64_t unit) { merge_moments(unit); };
    if (p.statistics_from != StatisticsFrom::Input) {
      partition.for_each_unit([&](int64_t unit) { take_statistics(unit); });
      partition.for_each_tile(normalise);
    } else if (output_.is_given()) {
      partition.for_each_tile_twice(find, merge, normalise);
    } else {
      partition.for_each_tile(find);
      partition.for_each_unit(merge);
    }
    if (p.statistics_from == StatisticsFrom::Input && p.running_mean != nullptr && partition.slice_pixels() > 0)
      update_running();
  }

 private:
  Moments& moments(int64_t part, int64_t index) const {
    return moments_.as<Moments>()[part * partition.slices() * p.channels + index];
  }

  void find_moments(const Tile& tile) {
    partition.for_each_strip(tile, [&](const Tile& strip) {
      Moments* of_channel = &moments(tile.part, Base::index(strip));
      for (int64_t i = 0; i < strip.channels; ++i) of_channel[i] = {};
      along ? find_moments_along(strip, of_channel) : find_moments_across(strip, of_channel);
    });
  }
  void find_moments_along(const Tile& tile, Moments* of_channel) {
    alignas(64) S buffer[kBlock<T>];
    partition.for_each_block(tile, [&](const Block& block) {
      const Lines<const S> x = Base::read(input, block, buffer);
      Moments* of_line = of_channel + block.channel - tile.channel;
      for (int64_t i = 0; i < block.channels; ++i)
        of_line[i] = merge(of_line[i], myvision::CPU_CAPABILITY::moments(x[i], block.pixels));
    });
  }
  void find_moments_across(const Tile& strip, Moments* of_channel) {
    alignas(64) S buffer[kBlock<T>];
    ColumnMoments<T> columns(strip.channels);
    partition.for_each_block(strip, [&](const Block& block) {
      const Lines<const S> x = Base::read(input, block, buffer);
      columns.add(x.data, x.pitch, block.pixels);
    });
    columns.merge_into(of_channel);
  }

  [[gnu::noinline]] void merge_moments(int64_t unit) {
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      Moments all;
      for (int64_t part = 0; part < partition.parts(); ++part)
        for (int64_t i = 0; i < partition.group_channels(); ++i) all = merge(all, moments(part, index + i));
      if (!std::isfinite(all.squares)) return use_extreme_statistics(group, channel, index);
      moments(0, index) = all;
      use_statistics(group, channel, index, statistics_of<T>(all, p.eps));
    });
  }
  void use_extreme_statistics(int64_t group, int64_t channel, int64_t index) {
    const Tile tile = Base::whole(index / p.channels, channel, partition.group_channels());
    const double count = static_cast<double>(tile.channels * tile.pixels);
    const auto visit_all = [&](const auto& visit) {
      alignas(64) S buffer[kBlock<T>];
      partition.for_each_block(tile, [&](const Block& block) {
        const Lines<const S> x = Base::read(input, block, buffer);
        for (int64_t line = 0; line < Base::lines(block); ++line)
          for (int64_t i = 0; i < Base::in_line(block); ++i) visit(static_cast<double>(x[line][i]));
      });
    };
    S buffer[1];
    const double first = static_cast<double>(Base::read(input, Block{tile.slice, 0, 0, 1, channel, 1}, buffer)[0][0]);
    const ExtremeMoments extreme = extreme_moments<T>(count, first, true, visit_all, [](double sum) { return sum; });
    moments(0, index) = {count, unscaled_mean<T>(extreme), unscaled_variance<T>(extreme) * count};
    use_statistics(group, channel, index, extreme_statistics<Statistics<T>>(extreme, p.eps));
  }

  void take_statistics(int64_t unit) {
    if (p.statistics_from == StatisticsFrom::Given) return Base::set_scale_from_statistics(unit);
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const double mean = static_cast<const T*>(p.running_mean)[channel];
      const double variance = static_cast<const T*>(p.running_var)[channel];
      use_statistics(group, channel, index, statistics_of<T>({1, mean, variance}, p.eps));
    });
  }

  void use_statistics(int64_t group, int64_t channel, int64_t index, const Statistics<T>& statistics) {
    Base::write_statistics(group, statistics);
    Base::set_scale(channel, index, statistics);
  }

  void normalise(const Tile& tile) {
    alignas(64) S x_buffer[kBlock<T>], residual_buffer[kBlock<T>], output_buffer[kBlock<T>];
    alignas(64) T z_buffer[kBlock<T>];
    Base::with_direction([&]<bool ALONG>(std::bool_constant<ALONG>) {
      partition.for_each_strip(tile, [&](const Tile& strip) {
        partition.for_each_block(strip, [&](const Block& block) {
          const Lines<const S> x = Base::read(input, block, x_buffer);
          write_output<ALONG>(Base::norm_lines(block, x, residual_buffer), p.activation,
                              Base::write(output_, block, output_buffer), z_buffer);
          Base::finish(output_, block, output_buffer);
        });
      });
    });
  }

  // Running statistics follow the average over the slices; here a group is one channel.
  void update_running() {
    const auto update = [&](void* running, int64_t channel, double sum) {
      T& value = static_cast<T*>(running)[channel];
      const double average = sum / static_cast<double>(partition.slices());
      value = static_cast<T>((1 - p.momentum) * value + p.momentum * average);
    };
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      double mean = 0, variance = 0;
      for (int64_t slice = 0; slice < partition.slices(); ++slice) {
        const Moments& of_slice = moments(0, slice * p.channels + channel);
        mean += of_slice.mean;
        variance += of_slice.squares / (of_slice.count - 1);
      }
      update(p.running_mean, channel, mean);
      update(p.running_var, channel, variance);
    }
  }

  const LineView<S> output_;
  Workspace moments_;
};

// ------------------------------------------------------------------------------------------------ backward
template <typename S>
class Backward : Kernel<S> {
  using Base = Kernel<S>;
  using T = Compute<S>;
  using Base::along;
  using Base::array;
  using Base::input;
  using Base::p;
  using Base::partition;

 public:
  Backward(const BatchNormParams& params, const BatchNormGradients& gradients, const Layout& layout)
      : Base(params, layout, !sums_come_first(gradients)),
        gradients_(gradients),
        grad_output_(Base::view(gradients.output)),
        grad_input_(Base::view(gradients.input)),
        grad_residual_(Base::view(gradients.residual)),
        sums_(partition.parts() * partition.slices() * p.channels * sizeof(Sums)) {}

  void run() {
    partition.for_each_unit([&](int64_t unit) { prepare(unit); });
    const bool wants_input = grad_input_.is_given(), two_passes = sums_come_first(gradients_);
    const bool wants_sums = gradients_.weight != nullptr || gradients_.bias != nullptr;
    const Pass first{two_passes || wants_sums || !wants_input, wants_input && !two_passes, false};
    const Pass second{false, true, grad_residual_.is_given()};
    const auto run_first = [&](const Tile& tile) { run_pass(first, tile); };
    const auto merge = [&](int64_t unit) {
      if (first.sums) merge_sums(unit);
    };
    if (two_passes) {
      partition.for_each_tile_twice(run_first, merge, [&](const Tile& tile) { run_pass(second, tile); });
    } else {
      partition.for_each_tile(run_first);
      partition.for_each_unit(merge);
    }
    if (first.sums) write_parameter_gradients();
    if (has_extremes_ && wants_input) partition.for_each_unit([&](int64_t unit) { rewrite_extremes(unit); });
  }

 private:
  struct Pass {
    bool sums, input_gradient;  // what it finds
    bool reads_gradient;        // before the activation: the first pass left it in the residual gradient
  };
  struct Buffers {
    alignas(64) S input[kBlock<T>], residual[kBlock<T>], grad_output[kBlock<T>], grad_residual[kBlock<T>],
        grad_input[kBlock<T>];
    alignas(64) T z[kBlock<T>];
  };

  static bool sums_come_first(const BatchNormGradients& gradients) {
    return gradients.stage == BackwardStage::Whole && gradients.training && gradients.input.data != nullptr;
  }

  Sums& sums(int64_t part, int64_t index) const {
    return sums_.as<Sums>()[part * partition.slices() * p.channels + index];
  }

  void prepare(int64_t unit) {
    Base::set_scale_from_statistics(unit);
    if (gradients_.stage == BackwardStage::Sums) return;
    const bool has_means = gradients_.stage == BackwardStage::Finish;
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      set_input_scale(group, channel, index, has_means ? means_of_group(channel, index) : Sums{});
      if (gradients_.training && is_extreme(Base::statistics_of_group(group)))
        __atomic_store_n(&has_extremes_, true, __ATOMIC_RELAXED);
    });
  }

  // Returns the means over a group of gradient * weight and of gradient * weight * normalised, once sums are known.
  Sums means_of_group(int64_t first_channel, int64_t index) const {
    if (gradients_.stage == BackwardStage::Finish) {
      const T* means = static_cast<const T*>(gradients_.sums);
      const double weight = Base::weight(first_channel);
      return {means[first_channel] * weight, means[p.channels + first_channel] * weight};
    }
    const double count = static_cast<double>(partition.slice_pixels() * partition.group_channels());
    Sums weighted;
    for (int64_t i = 0; i < partition.group_channels(); ++i) {
      const double weight = Base::weight(first_channel + i);
      weighted.add({sums(0, index + i).gradient * weight, sums(0, index + i).product * weight});
    }
    return {weighted.gradient / count, weighted.product / count};
  }

  // Input gradient = (input - mean) * scale + shift + gradient * factor.
  void set_input_scale(int64_t group, int64_t first_channel, int64_t index, const Sums& means) {
    const Statistics<T> s = Base::statistics_of_group(group);
    const double rstd = s.rstd, scale = -rstd * rstd * means.product;
    for (int64_t i = 0; i < partition.group_channels(); ++i) {
      *array(Base::kInputScale, index + i) = static_cast<T>(scale);
      *array(Base::kInputShift, index + i) = static_cast<T>(-rstd * means.gradient - s.rest * scale);
      *array(Base::kInputFactor, index + i) = static_cast<T>(rstd * Base::weight(first_channel + i));
    }
  }

  void run_pass(const Pass& pass, const Tile& tile) {
    Base::with_direction([&]<bool ALONG>(std::bool_constant<ALONG>) {
      partition.for_each_strip(tile, [&](const Tile& strip) {
        const int64_t index = Base::index(strip);
        Sums* of_strip = &sums(tile.part, index);
        if (pass.sums)
          for (int64_t i = 0; i < strip.channels; ++i) of_strip[i] = {};
        ColumnSums<T> columns(array(Base::kMean, index), ALONG ? 0 : strip.channels, of_strip);
        partition.for_each_block(strip, [&](const Block& block) { run_block<ALONG>(pass, tile, block, columns); });
        columns.finish();
      });
    });
  }

  template <bool ALONG>
  void run_block(const Pass& pass, const Tile& tile, const Block& block, ColumnSums<T>& columns) {
    Buffers buffers;
    const int64_t lines = Base::lines(block), n = Base::in_line(block), index = Base::index(block);
    const Lines<const S> x = needs_input(pass) ? Base::read(input, block, buffers.input) : Lines<const S>{};
    const Lines<S> copy = pass.reads_gradient ? Lines<S>{} : Base::write(grad_residual_, block, buffers.grad_residual);
    const auto use = [&](const auto& gradients) {
      if (pass.sums) {
        add_sums<ALONG>(gradients, x, copy, block, &sums(tile.part, index), columns);
      } else if (copy.data != nullptr) {
        for (int64_t line = 0; line < lines; ++line) {
          const auto gradient = gradients(line);
          write_line<T>(copy[line], n, [&](int64_t i, int64_t count) { return gradient.at(i, count); });
        }
      }
      if (!pass.input_gradient) return;
      const Affine<T> channels{array(Base::kMean, index), array(Base::kInputScale, index),
                               array(Base::kInputShift, index)};
      const Lines<S> out = Base::write(grad_input_, block, buffers.grad_input);
      write_input_gradient<ALONG>(gradients, gradients_.training ? x : Lines<const S>{}, channels,
                                  array(Base::kInputFactor, index), out, lines, n);
      Base::finish(grad_input_, block, buffers.grad_input);
    };
    if (pass.reads_gradient) {
      const Lines<const S> given = Base::read(grad_residual_, block, buffers.grad_residual);
      use(GivenGradients<S>{given});
    } else {
      const Lines<const S> after = Base::read(grad_output_, block, buffers.grad_output);
      with_gradient<ALONG>(Base::norm_lines(block, x, buffers.residual), p.activation, after, buffers.z, use);
      Base::finish(grad_residual_, block, buffers.grad_residual);
    }
  }

  template <bool ALONG, typename Gradients>
  void add_sums(const Gradients& gradients, Lines<const S> x, Lines<S> copy, const Block& block, Sums* of_channel,
                ColumnSums<T>& columns) {
    if constexpr (ALONG) {
      for (int64_t line = 0; line < Base::lines(block); ++line) {
        const T mean = *array(Base::kMean, Base::index(block) + line);
        S* copy_line = copy.data == nullptr ? nullptr : copy[line];
        of_channel[line].add(sums_along(gradients(line), x[line], mean, block.pixels, copy_line));
      }
    } else {
      columns.add(gradients, x, copy, Base::lines(block));
    }
  }

  bool needs_input(const Pass& pass) const {
    return pass.sums || (pass.input_gradient && gradients_.training) ||
           (p.activation.kind != ActivationKind::None && !pass.reads_gradient);
  }

  // Adds up the parts, and turns sums of gradient * (x - mean) into those of gradient * normalised.
  [[gnu::noinline]] void merge_sums(int64_t unit) {
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const Statistics<T> s = Base::statistics_of_group(group);
      for (int64_t i = 0; i < partition.group_channels(); ++i) {
        Sums all;
        for (int64_t part = 0; part < partition.parts(); ++part) all.add(sums(part, index + i));
        all.product = (all.product - s.rest * all.gradient) * s.rstd;
        sums(0, index + i) = is_extreme(s) ? extreme_sums(s, channel + i, index + i) : all;
      }
      if (gradients_.training && gradients_.stage == BackwardStage::Whole)
        set_input_scale(group, channel, index, means_of_group(channel, index));
    });
  }

  // ---- groups that spread so widely, or so little, that sums of distances or 1 / variance leave the range of T:
  // number by number, in doubles. What the passes wrote of their input gradient is written anew.
  static bool is_extreme(const Statistics<T>& s) {
    constexpr double kMost = sizeof(T) == sizeof(double) ? 0x1p500 : 0x1p60;
    return s.rstd > 0 && std::isfinite(s.rstd) && (s.rstd > kMost || s.rstd < 1 / kMost);
  }

  // Calls body(block, x, g) for the blocks of one channel of a slice, with lines of the gradient before the activation.
  template <typename Body>
  void for_each_block_of_channel(int64_t slice, int64_t channel, const Body& body) const {
    partition.for_each_block(Base::whole(slice, channel, 1), [&](const Block& block) {
      Buffers buffers;
      alignas(64) T g[kBlock<T>];
      const Lines<const S> x = Base::read(input, block, buffers.input);
      const Lines<const S> after = Base::read(grad_output_, block, buffers.grad_output);
      const int64_t n = Base::in_line(block);
      Base::with_direction([&]<bool ALONG>(std::bool_constant<ALONG>) {
        with_gradient<ALONG>(
            Base::norm_lines(block, x, buffers.residual), p.activation, after, buffers.z, [&](const auto& gradients) {
              for (int64_t line = 0; line < Base::lines(block); ++line)
                write_line<T>(g + line * n, n, [&](int64_t i, int64_t count) { return gradients(line).at(i, count); });
            });
      });
      body(block, x, Lines<const T>{g, n});
    });
  }

  static double normalised(const Statistics<T>& s, S x) {
    return (static_cast<double>(x) - s.mean) * s.rstd - static_cast<double>(s.rest) * s.rstd;
  }

  Sums extreme_sums(const Statistics<T>& s, int64_t channel, int64_t index) const {
    Sums all;
    for_each_block_of_channel(index / p.channels, channel, [&](const Block& block, Lines<const S> x, Lines<const T> g) {
      for (int64_t line = 0; line < Base::lines(block); ++line)
        for (int64_t i = 0; i < Base::in_line(block); ++i)
          all.add({g[line][i], g[line][i] * normalised(s, x[line][i])});
    });
    return all;
  }

  void rewrite_extremes(int64_t unit) const {
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const Statistics<T> s = Base::statistics_of_group(group);
      if (!is_extreme(s)) return;
      const Sums means = means_of_group(channel, index);
      for (int64_t i = 0; i < partition.group_channels(); ++i)
        write_extreme_gradient(s, means, index / p.channels, channel + i);
    });
  }
  void write_extreme_gradient(const Statistics<T>& s, const Sums& means, int64_t slice, int64_t channel) const {
    const double weight = Base::weight(channel);
    for_each_block_of_channel(slice, channel, [&](const Block& block, Lines<const S> x, Lines<const T> g) {
      alignas(64) S buffer[kBlock<T>];
      const Lines<S> out = Base::write(grad_input_, block, buffer);
      for (int64_t line = 0; line < Base::lines(block); ++line)
        for (int64_t i = 0; i < Base::in_line(block); ++i) {
          const double centered = g[line][i] * weight - means.gradient - normalised(s, x[line][i]) * means.product;
          out[line][i] = static_cast<S>(static_cast<T>(s.rstd * centered));
        }
      Base::finish(grad_input_, block, buffer);
    });
  }

  void write_parameter_gradients() const {
    const bool wants_sums = gradients_.stage == BackwardStage::Sums;
    const auto write = [&](void* to, int64_t at, double value) {
      if (to != nullptr) static_cast<T*>(to)[at] = static_cast<T>(value);
    };
    for (int64_t channel = 0; channel < p.channels; ++channel) {
      Sums all;
      for (int64_t slice = 0; slice < partition.slices(); ++slice) all.add(sums(0, slice * p.channels + channel));
      write(gradients_.bias, channel, all.gradient);
      write(gradients_.weight, channel, all.product);
      if (!wants_sums) continue;
      write(gradients_.sums, channel, all.gradient);
      write(gradients_.sums, p.channels + channel, all.product);
    }
  }

  const BatchNormGradients& gradients_;
  const LineView<S> grad_output_, grad_input_, grad_residual_;
  Workspace sums_;
  bool has_extremes_ = false;
};

// Half types as they are, if all lines lie side by side, or else brought to float. So are lines along small planes:
// several at once, as the vector at a line's end costs more than the others together.
template <typename Body>
void with_line_type(const BatchNormParams& p, const Layout& layout, const Body& body) {
  constexpr int64_t kShort = 128;
  const Dtype dtype = p.dtype;
  const bool in_place = layout.in_place && !(layout.along && p.width < kShort);
  if (dtype == Dtype::Float64) return body(double());
  if (in_place && dtype == Dtype::Float16) return body(c10::Half());
  if (in_place && dtype == Dtype::BFloat16) return body(c10::BFloat16());
  body(float());
}

}  // namespace

void forward(const BatchNormParams& params) {
  BatchNormParams p = params;
  merge_batch(p, p.input, p.residual, p.output);
  const Layout layout = layout_of(p, p.input, p.residual, p.output);
  with_line_type(p, layout, [&](auto type) { Forward<decltype(type)>(p, layout).run(); });
}

void backward(const BatchNormParams& params, const BatchNormGradients& gradients) {
  BatchNormParams p = params;
  BatchNormGradients g = gradients;
  merge_batch(p, p.input, p.residual, g.output, g.input, g.residual);
  const Layout layout = layout_of(p, p.input, p.residual, g.output, g.input, g.residual);
  with_line_type(p, layout, [&](auto type) { Backward<decltype(type)>(p, g, layout).run(); });
}

}  // namespace myvision::CPU_CAPABILITY::batch_norm
