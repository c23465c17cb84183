// batch_norm on the CPU, compiled once per instruction set.
//
// Forward reads the input for its moments and again to normalise it, backward reads gradient, input and residual for
// their sums and again for the input gradient. Along planes (NCHW) a few channels are done from beginning to end before
// the next, so that the second reading finds them in the cache and memory moves each number once. Across channels
// (channels_last) all of the first reading comes first, and the second goes backwards. Where a residual gradient is
// wanted, the first reading writes it and the second reads it in place of what it was made of.
#include "common/workspace.h"
#include "ops/batch_norm/batch_norm_lines.h"
#include "ops/batch_norm/batch_norm_partition.h"

namespace myvision::CPU_CAPABILITY {
namespace {

template <typename T>
constexpr int64_t kBlock = ColumnMoments<T>::kColumns;  // numbers of a tensor at a time: those of five stay in L1

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

// Whether a line runs through pixels rather than channels.
bool runs_along(const BatchNormParams& p) {
  if (p.width == 1) return false;
  const int64_t channel = p.input.stride[1], pixel = p.input.stride[3];
  return p.channels == 1 || pixel == 1 || (channel != 1 && pixel <= channel);
}

template <typename... Tensors>
bool is_crossed(bool along, const Tensors&... tensors) {
  const auto crossed = [&](const Strided4& t) { return t.stride[along ? 3 : 1] != 1 && t.stride[along ? 1 : 3] == 1; };
  return ((tensors.data != nullptr && crossed(tensors)) || ...);
}

// What forward and backward share. T is the type computed in.
template <typename T>
class Kernel {
 protected:
  Kernel(const BatchNormParams& params, bool crossed)
      : p(params),
        along(runs_along(params)),
        partition({p.batch, p.channels, p.height, p.width}, p.groups, along, crossed, kBlock<T>),
        input(view(p.input)),
        residual(view(p.residual)),
        coefficients_(kArrays * partition.slices() * p.channels * sizeof(T)) {
    // Of a residual
    T* ones = array(3);
    for (int64_t i = 0; i < partition.slices() * p.channels; ++i) ones[i] = 1;
  }

  LineView<T> view(const Strided4& tensor) const { return {tensor, p.dtype, along ? 1 : 3, along ? 3 : 1}; }
  int64_t lines(const Block& block) const { return along ? block.channels : block.pixels; }
  int64_t in_line(const Block& block) const { return along ? block.pixels : block.channels; }
  static int64_t offset(const LineView<T>& tensor, const Block& b) {
    return tensor.offset(b.image, b.channel, b.y, b.x);
  }
  Lines<const T> read(const LineView<T>& tensor, const Block& block, T* buffer) const {
    if (!tensor.is_given()) return {nullptr, 0};
    return tensor.read(offset(tensor, block), lines(block), in_line(block), buffer);
  }
  Lines<T> write(const LineView<T>& tensor, const Block& block, T* buffer) const {
    return tensor.write(offset(tensor, block), in_line(block), buffer);
  }
  void finish(const LineView<T>& tensor, const Block& block, const T* buffer) const {
    tensor.finish(offset(tensor, block), lines(block), in_line(block), buffer);
  }

  // ---- statistics
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

  // body(group of all, its first channel, the index of that among the channels of all slices)
  template <typename Body>
  void for_each_group(int64_t unit, const Body& body) const {
    const Tile tile = partition.tile(unit, 0);
    for (int64_t channel = tile.channel; channel < tile.channel + tile.channels; channel += partition.group_channels())
      body(tile.slice * groups() + channel / partition.group_channels(), channel, tile.slice * p.channels + channel);
  }

  // ---- of each channel of each slice
  // z = (input - mean) * scale + shift + residual * 1
  Affine<T> forward_of(int64_t slice, int64_t channel) const {
    return Affine<T>{array(0), array(1), array(2), array(3)} + (slice * p.channels + channel);
  }
  // input gradient = (input - mean) * scale + shift + gradient * factor
  Affine<T> backward_of(int64_t slice, int64_t channel) const {
    return Affine<T>{array(0), array(4), array(5), array(6)} + (slice * p.channels + channel);
  }

  void set_forward(int64_t first_channel, int64_t index, const Statistics<T>& s) const {
    for (int64_t i = 0; i < partition.group_channels(); ++i) {
      const double scale = weight(first_channel + i) * s.rstd;
      array(0)[index + i] = s.mean;
      array(1)[index + i] = static_cast<T>(scale);
      array(2)[index + i] = static_cast<T>(bias(first_channel + i) - s.rest * scale);
    }
  }
  void set_forward_from_statistics(int64_t unit) const {
    for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      set_forward(channel, index, statistics_of_group(group));
    });
  }

  T* array(int64_t i) const { return coefficients_.template as<T>() + i * partition.slices() * p.channels; }

  const BatchNormParams& p;
  const bool along;
  const Partition partition;
  const LineView<T> input, residual;

 private:
  static constexpr int64_t kArrays = 7;
  Workspace coefficients_;
};

// ------------------------------------------------------------------------------------------------ forward
template <typename T>
class Forward : Kernel<T> {
  using Base = Kernel<T>;
  using Base::along;
  using Base::input;
  using Base::p;
  using Base::partition;
  using Base::residual;

 public:
  explicit Forward(const BatchNormParams& params)
      : Base(params, is_crossed(runs_along(params), params.input, params.residual, params.output)),
        output_(Base::view(p.output)),
        moments_(partition.parts() * partition.slices() * p.channels * sizeof(Moments)) {}

  void run() {
    const auto normalise = [&](const Tile& tile) { this->normalise(tile); };
    if (p.statistics_from == StatisticsFrom::Input) {
      partition.for_each_tile_twice([&](const Tile& tile) { find_moments(tile); },
                                    [&](int64_t unit) { merge_moments(unit); }, normalise);
      if (p.running_mean != nullptr && partition.slice_pixels() > 0) update_running();
    } else {
      partition.for_each_unit([&](int64_t unit) { take_statistics(unit); });
      partition.for_each_tile(normalise);
    }
  }

 private:
  Moments& moments(int64_t part, int64_t index) const {
    return moments_.as<Moments>()[part * partition.slices() * p.channels + index];
  }

  void find_moments(const Tile& tile) {
    partition.for_each_strip(tile, [&](const Tile& strip) {
      Moments* of_channel = &moments(tile.part, strip.slice * p.channels + strip.channel);
      for (int64_t i = 0; i < strip.channels; ++i) of_channel[i] = {};
      along ? find_moments_along(strip, of_channel) : find_moments_across(strip, of_channel);
    });
  }
  void find_moments_along(const Tile& strip, Moments* of_channel) {
    alignas(64) T buffer[kBlock<T>];
    partition.for_each_block(strip, [&](const Block& block) {
      const Lines<const T> x = Base::read(input, block, buffer);
      for (int64_t i = 0; i < block.channels; ++i)
        of_channel[i] = merge(of_channel[i], myvision::CPU_CAPABILITY::moments(x[i], block.pixels));
    });
  }
  void find_moments_across(const Tile& strip, Moments* of_channel) {
    alignas(64) T buffer[kBlock<T>];
    ColumnMoments<T> columns(strip.channels);
    partition.for_each_block(strip, [&](const Block& block) {
      const Lines<const T> x = Base::read(input, block, buffer);
      columns.add(x.data, x.pitch, block.pixels);
    });
    columns.merge_into(of_channel);
  }

  void merge_moments(int64_t unit) {
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      Moments all;
      for (int64_t part = 0; part < partition.parts(); ++part)
        for (int64_t i = 0; i < partition.group_channels(); ++i) all = merge(all, moments(part, index + i));
      moments(0, index) = all;
      use_statistics(group, channel, index, statistics_of<T>(all, p.eps));
    });
  }

  void take_statistics(int64_t unit) {
    if (p.statistics_from == StatisticsFrom::Given) return Base::set_forward_from_statistics(unit);
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const double mean = static_cast<const T*>(p.running_mean)[channel];
      const double variance = static_cast<const T*>(p.running_var)[channel];
      use_statistics(group, channel, index, statistics_of<T>({1, mean, variance}, p.eps));
    });
  }

  void use_statistics(int64_t group, int64_t channel, int64_t index, const Statistics<T>& statistics) {
    Base::write_statistics(group, statistics);
    Base::set_forward(channel, index, statistics);
  }

  void normalise(const Tile& tile) {
    if (!output_.is_given()) return;
    alignas(64) T x_buffer[kBlock<T>], residual_buffer[kBlock<T>], output_buffer[kBlock<T>];
    partition.for_each_strip(tile, [&](const Tile& strip) {
      const Affine<T> channel = Base::forward_of(strip.slice, strip.channel);
      partition.for_each_block(strip, [&](const Block& block) {
        const Lines<const T> x = Base::read(input, block, x_buffer);
        const Lines<T> z = Base::write(output_, block, output_buffer);
        affine(along, x, Base::read(residual, block, residual_buffer), channel, z, Base::lines(block),
               Base::in_line(block));
        activate_lines(p.activation, z, Base::lines(block), Base::in_line(block));
        Base::finish(output_, block, output_buffer);
      });
    });
  }

  // By the average over the slices; one channel a group.
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

  const LineView<T> output_;
  Workspace moments_;
};

// ------------------------------------------------------------------------------------------------ backward
template <typename T>
class Backward : Kernel<T> {
  using Base = Kernel<T>;
  using Base::along;
  using Base::input;
  using Base::p;
  using Base::partition;
  using Base::residual;

 public:
  Backward(const BatchNormParams& params, const BatchNormGradients& gradients)
      : Base(params, is_crossed(runs_along(params), params.input, params.residual, gradients.output, gradients.input,
                                gradients.residual)),
        gradients_(gradients),
        grad_output_(Base::view(gradients.output)),
        grad_input_(Base::view(gradients.input)),
        grad_residual_(Base::view(gradients.residual)),
        sums_(partition.parts() * partition.slices() * p.channels * sizeof(Sums)) {}

  void run() {
    partition.for_each_unit([&](int64_t unit) { prepare(unit); });
    const bool wants_input = grad_input_.is_given();
    const bool finds_sums = gradients_.stage != BackwardStage::Finish;
    const bool needs_sums = gradients_.training && wants_input && finds_sums;
    const Pass first{finds_sums && (needs_sums || gradients_.weight || gradients_.bias || gradients_.sums),
                     wants_input && !needs_sums, false};
    const auto merge = [&](int64_t unit) {
      if (first.sums) merge_sums(unit);
    };
    if (needs_sums) {
      const Pass second{false, true, grad_residual_.is_given()};
      partition.for_each_tile_twice([&](const Tile& tile) { run_pass(first, tile); }, merge,
                                    [&](const Tile& tile) { run_pass(second, tile); });
    } else {
      partition.for_each_tile([&](const Tile& tile) { run_pass(first, tile); });
      partition.for_each_unit(merge);
    }
    if (first.sums) write_parameter_gradients();
  }

 private:
  struct Pass {
    bool sums, input_gradient;  // what it finds
    bool reads_gradient;        // before the activation, which an earlier pass left in the residual gradient
  };
  struct Buffers {
    alignas(64) T input[kBlock<T>], residual[kBlock<T>], z[kBlock<T>], grad_output[kBlock<T>], gradient[kBlock<T>],
        grad_input[kBlock<T>];
  };

  Sums& sums(int64_t part, int64_t index) const {
    return sums_.as<Sums>()[part * partition.slices() * p.channels + index];
  }

  void prepare(int64_t unit) {
    Base::set_forward_from_statistics(unit);
    if (gradients_.stage == BackwardStage::Sums) return;
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const T* given = static_cast<const T*>(gradients_.sums);
      const bool has_means = gradients_.stage == BackwardStage::Finish;
      set_backward(group, channel, index, has_means ? given[channel] * Base::weight(channel) : 0,
                   has_means ? given[p.channels + channel] * Base::weight(channel) : 0);
    });
  }

  // From the means over a group of gradient * weight and of gradient * weight * normalised.
  void set_backward(int64_t group, int64_t first_channel, int64_t index, double mean_gradient, double mean_product) {
    const Statistics<T> s = Base::statistics_of_group(group);
    const double rstd = s.rstd, scale = -rstd * rstd * mean_product;
    for (int64_t i = 0; i < partition.group_channels(); ++i) {
      Base::array(4)[index + i] = static_cast<T>(scale);
      Base::array(5)[index + i] = static_cast<T>(-rstd * mean_gradient - s.rest * scale);
      Base::array(6)[index + i] = static_cast<T>(rstd * Base::weight(first_channel + i));
    }
  }

  void run_pass(const Pass& pass, const Tile& tile) {
    Buffers buffers;
    partition.for_each_strip(tile, [&](const Tile& strip) {
      const int64_t index = strip.slice * p.channels + strip.channel;
      Sums* of_channel = &sums(tile.part, index);
      const Affine<T> forward = Base::forward_of(strip.slice, strip.channel);
      const Affine<T> backward = Base::backward_of(strip.slice, strip.channel);
      ColumnSums<T> columns(forward.mean, along ? 0 : strip.channels, of_channel);
      if (pass.sums)
        for (int64_t i = 0; i < strip.channels; ++i) of_channel[i] = {};
      partition.for_each_block(strip, [&](const Block& block) {
        const Lines<const T> x = needs_input(pass) ? Base::read(input, block, buffers.input) : Lines<const T>{};
        const Lines<const T> g = pass.reads_gradient ? Base::read(grad_residual_, block, buffers.gradient)
                                                     : gradient(block, x, forward, buffers);
        if (pass.sums && along) {
          for (int64_t i = 0; i < block.channels; ++i)
            of_channel[i].add(sums_along(g[i], x[i], forward.mean[i], block.pixels));
        } else if (pass.sums) {
          columns.add(g, x, block.pixels);
        }
        if (pass.input_gradient)
          write_input_gradient(block, gradients_.training ? x : Lines<const T>{}, g, backward, buffers);
      });
      columns.finish();
    });
  }

  bool needs_input(const Pass& pass) const {
    return pass.sums || (pass.input_gradient && gradients_.training) || (needs_z() && !pass.reads_gradient);
  }
  bool needs_z() const { return p.activation.kind != ActivationKind::None; }

  // Before the activation; it is the residual gradient too.
  Lines<const T> gradient(const Block& block, Lines<const T> x, const Affine<T>& forward, Buffers& buffers) {
    const Lines<const T> after = Base::read(grad_output_, block, buffers.grad_output);
    if (!needs_z() && !grad_residual_.is_given()) return after;
    const int64_t lines = Base::lines(block), in_line = Base::in_line(block);
    const Lines<T> z{buffers.z, in_line};
    if (needs_z()) affine(along, x, Base::read(residual, block, buffers.residual), forward, z, lines, in_line);
    const Lines<T> before = grad_residual_.is_given() ? Base::write(grad_residual_, block, buffers.gradient)
                                                      : Lines<T>{buffers.gradient, in_line};
    activate_lines_backward(p.activation, after, needs_z() ? as_const(z) : after, before, lines, in_line);
    if (grad_residual_.is_given()) Base::finish(grad_residual_, block, buffers.gradient);
    return as_const(before);
  }

  void write_input_gradient(const Block& block, Lines<const T> x, Lines<const T> gradient, const Affine<T>& backward,
                            Buffers& buffers) {
    const Lines<T> to = Base::write(grad_input_, block, buffers.grad_input);
    affine(along, x, gradient, backward, to, Base::lines(block), Base::in_line(block));
    Base::finish(grad_input_, block, buffers.grad_input);
  }

  // Over the parts, and from gradient * (x - mean) to gradient * normalised.
  void merge_sums(int64_t unit) {
    const double count = static_cast<double>(partition.slice_pixels() * partition.group_channels());
    Base::for_each_group(unit, [&](int64_t group, int64_t channel, int64_t index) {
      const Statistics<T> s = Base::statistics_of_group(group);
      Sums weighted;
      for (int64_t i = 0; i < partition.group_channels(); ++i) {
        Sums all;
        for (int64_t part = 0; part < partition.parts(); ++part) all.add(sums(part, index + i));
        all.product = (all.product - s.rest * all.gradient) * s.rstd;
        sums(0, index + i) = all;
        const double weight = Base::weight(channel + i);
        weighted.add({all.gradient * weight, all.product * weight});
      }
      if (gradients_.training && gradients_.stage == BackwardStage::Whole)
        set_backward(group, channel, index, weighted.gradient / count, weighted.product / count);
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
  const LineView<T> grad_output_, grad_input_, grad_residual_;
  Workspace sums_;
};

}  // namespace

void batch_norm_forward(const BatchNormParams& params) {
  BatchNormParams p = params;
  merge_batch(p, p.input, p.residual, p.output);
  p.dtype == Dtype::Float64 ? Forward<double>(p).run() : Forward<float>(p).run();
}

void batch_norm_backward(const BatchNormParams& params, const BatchNormGradients& gradients) {
  BatchNormParams p = params;
  BatchNormGradients g = gradients;
  merge_batch(p, p.input, p.residual, g.output, g.input, g.residual);
  p.dtype == Dtype::Float64 ? Backward<double>(p, g).run() : Backward<float>(p, g).run();
}

}  // namespace myvision::CPU_CAPABILITY
