// How the CPU kernels cut up the work of batch_norm: from sizes and strides alone, so that sums are made in one order
// for any number of threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "common/parallel.h"
#include "common/rounding.h"
#include "ops/batch_norm/batch_norm.h"

namespace myvision::CPU_CAPABILITY::batch_norm {

// Sizes of the tensors, and what shares statistics.
struct Shape4 {
  int64_t batch, channels, height, width;
};

// What a slice's channels are normalised by belongs to the slice alone: an image, or all of them where groups == 0.
// Its pixels are counted through: image, height, width.
struct Tile {
  int64_t unit, part;
  int64_t slice, channel, channels, pixel, pixels;
};

// What is brought into L1 at a time: pixels within one row of an image.
struct Block {
  int64_t image, y, x, pixels, channel, channels;
};

class Partition {
 public:
  // `crossed`: some tensor lies along the other dimension than input does. `once`: nothing is read twice. A block has
  // at most so many numbers, but always as many lines.
  Partition(const Shape4& shape, int64_t groups, bool along, bool crossed, bool once, int64_t block_numbers,
            int64_t least_lines)
      : shape_(shape), along_(along), once_(once) {
    group_channels_ = groups == 0 ? 1 : shape.channels / groups;
    slices_ = groups == 0 ? 1 : shape.batch;
    slice_pixels_ = (groups == 0 ? shape.batch : 1) * shape.height * shape.width;
    set_blocks(crossed ? kCrossed : block_numbers, block_numbers, least_lines);
    set_units(block_numbers);
  }

  int64_t slices() const { return slices_; }
  int64_t slice_pixels() const { return slice_pixels_; }
  int64_t group_channels() const { return group_channels_; }
  int64_t units() const { return slices_ * slice_units_; }
  int64_t parts() const { return parts_; }
  int64_t tiles() const { return units() * parts_; }

  Tile tile(int64_t unit, int64_t part) const {
    const int64_t channel = unit % slice_units_ * unit_channels_, pixel = part * part_pixels_;
    return {unit,
            part,
            unit / slice_units_,
            channel,
            std::min(unit_channels_, shape_.channels - channel),
            pixel,
            std::min(part_pixels_, slice_pixels_ - pixel)};
  }

  // Across channels: strips of a tile's channels, as wide as a block.
  template <typename Body>
  void for_each_strip(const Tile& tile, const Body& body) const {
    const int64_t width = along_ ? tile.channels : block_channels_;
    Tile strip = tile;
    for (int64_t done = 0; done < tile.channels; done += width) {
      strip.channel = tile.channel + done;
      strip.channels = std::min(width, tile.channels - done);
      body(strip);
    }
  }
  template <typename Body>
  void for_each_block(const Tile& strip, const Body& body) const {
    const int64_t image_pixels = shape_.height * shape_.width;
    for (int64_t pixel = strip.pixel; pixel < strip.pixel + strip.pixels;) {
      const int64_t in_image = pixel % image_pixels, x = in_image % shape_.width;
      const int64_t left = std::min(shape_.width - x, strip.pixel + strip.pixels - pixel);
      Block block{strip.slice + pixel / image_pixels, in_image / shape_.width, x, std::min(block_pixels_, left), 0, 0};
      for (int64_t done = 0; done < strip.channels; done += block_channels_) {
        block.channel = strip.channel + done;
        block.channels = std::min(block_channels_, strip.channels - done);
        body(block);
      }
      pixel += block.pixels;
    }
  }

  // Calls body(tile) for all tiles, in any order.
  template <typename Body>
  void for_each_tile(const Body& body) const {
    parallel_for(0, tiles(), grain(tiles()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) body(tile_in_order(i));
    });
  }
  template <typename Body>
  void for_each_unit(const Body& body) const {
    parallel_for(0, units(), grain(units()), [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; ++unit) body(unit);
    });
  }

  // For every unit: first(tile) of all its tiles, merge(unit), and second(tile) of all of them, the last one first, as
  // it is the likeliest to be in the cache still.
  template <typename First, typename Merge, typename Second>
  void for_each_tile_twice(const First& first, const Merge& merge, const Second& second) const {
    const int64_t threads = num_threads();
    if (units() % threads == 0 || units() > 4 * threads) {
      return for_each_unit([&](int64_t unit) {
        for (int64_t part = 0; part < parts_; ++part) first(tile(unit, part));
        merge(unit);
        for (int64_t part = parts_; part-- > 0;) second(tile(unit, part));
      });
    }
    for_each_tile(first);
    for_each_unit(merge);
    parallel_for(0, tiles(), grain(tiles()), [&](int64_t begin, int64_t end) {
      for (int64_t i = end; i-- > begin;) second(tile_in_order(i));
    });
  }

 private:
  static constexpr int64_t kCrossed = 32;                     // numbers of a line, for whole squares to transpose
  static constexpr int64_t kUnitNumbers = int64_t(1) << 16;   // a unit of small planes: it stays in L2
  static constexpr int64_t kPartNumbers = int64_t(1) << 16;   // a part is worth merging
  static constexpr int64_t kMostParts = 32;                   // of a unit
  static constexpr int64_t kGrainNumbers = int64_t(1) << 14;  // that are worth a thread

  // The order is that of memory or, where tiles are read again, that of units.
  Tile tile_in_order(int64_t i) const { return once_ ? tile(i % units(), i / units()) : tile(i / parts_, i % parts_); }

  void set_blocks(int64_t most_in_line, int64_t numbers, int64_t least_lines) {
    int64_t& in_line = along_ ? block_pixels_ : block_channels_;
    int64_t& lines = along_ ? block_channels_ : block_pixels_;
    in_line = std::clamp(along_ ? shape_.width : shape_.channels, int64_t(1), most_in_line);
    lines = std::max(numbers / in_line, least_lines);
  }

  // A unit is whole groups: along, as many as stay in L2; across, as many as fit a block, so that memory is read in
  // order. Images that are read once are cut up in the order of memory too.
  void set_units(int64_t block_numbers) {
    const bool by_image = along_ && once_;
    const int64_t image_pixels = shape_.height * shape_.width, step = by_image ? image_pixels : 1;
    const int64_t unit_numbers =
        along_ ? kUnitNumbers / std::max(by_image ? step : slice_pixels_, int64_t(1)) : block_numbers;
    unit_channels_ = std::max(unit_numbers / group_channels_, int64_t(1)) * group_channels_;
    slice_units_ = ceil_div(shape_.channels, unit_channels_);
    const int64_t numbers = std::min(unit_channels_, shape_.channels) * slice_pixels_;
    const int64_t steps = slice_pixels_ / std::max(step, int64_t(1));
    parts_ = std::clamp(by_image ? steps : numbers / kPartNumbers, int64_t(1), kMostParts);
    part_pixels_ = std::max(ceil_div(steps, parts_) * step, int64_t(1));
    parts_ = std::max(ceil_div(slice_pixels_, part_pixels_), int64_t(1));
  }

  int64_t grain(int64_t tasks) const {
    const int64_t numbers = slices_ * slice_pixels_ * shape_.channels / std::max(tasks, int64_t(1));
    return std::max(kGrainNumbers / std::max(numbers, int64_t(1)), int64_t(1));
  }

  Shape4 shape_;
  bool along_, once_;
  int64_t group_channels_, slices_, slice_pixels_;
  int64_t block_channels_, block_pixels_;
  int64_t unit_channels_, slice_units_;  // of a slice
  int64_t parts_, part_pixels_;          // of a unit
};

}  // namespace myvision::CPU_CAPABILITY::batch_norm
