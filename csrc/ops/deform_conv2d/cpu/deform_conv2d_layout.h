// How the CPU kernel of deform_conv2d cuts its work: channels into blocks and units, images into padded slices, outputs
// into tiles. Plain integer arithmetic.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/rounding.h"
#include "ops/deform_conv2d/deform_conv2d.h"

namespace myvision::CPU_CAPABILITY::deform_conv2d {

constexpr int64_t kTilePixels = 128;  // most output pixels of a tile
constexpr int64_t kTileWidth = 32;    // and its greatest width
constexpr int64_t kDepth = 288;    // about this many columns (taps x channels) are sampled before they are multiplied
constexpr int64_t kMinBlock = 32;  // but no fewer channels at once: every block reads the whole plan again
constexpr int64_t kMaxTaps = 32;   // kernels with more taps are sampled in ranges

// A block is a run of channels of one weight group and one offset group: its sampled pixels share one plan.
// A unit is a run of blocks of one weight group whose columns are multiplied together.
// Taps are taken in ranges; a unit's columns of one range are ordered [block][tap][channel].
struct Layout {
  int64_t group_channels, offset_group_channels;  // per group
  int64_t segment;                                // channels between borders of either kind of group
  int64_t block_channels, blocks_per_segment;     // the last block of a segment may have fewer
  int64_t blocks_per_group, blocks_per_unit, units_per_group, units;
  int64_t taps, range_taps, ranges;
  int64_t pitch, plane;  // of a padded slice, in pixels
  int64_t outside;       // the pixel of a padded slice, all zeros around it, that stands for points outside the image

  // `threads` > 1: cut into at least so many units, where channels allow, for the sake of parallelism.
  Layout(const DeformConv2dParams& p, int64_t vector_size, int64_t threads)
      : group_channels(p.in_channels / p.groups),
        offset_group_channels(p.in_channels / p.offset_groups),
        segment(std::gcd(group_channels, offset_group_channels)),
        taps(p.kernel_h * p.kernel_w),
        ranges(ceil_div(taps, kMaxTaps)),
        pitch(p.width + 2),
        plane((p.height + 3) * pitch),
        outside((p.height + 1) * pitch) {
    range_taps = ceil_div(taps, ranges);
    const int64_t most = std::max(kDepth / range_taps / vector_size * vector_size, kMinBlock);
    const int64_t segments = p.in_channels / segment;
    const int64_t cuts = round_up(segments * ceil_div(segment, most), threads) / segments;
    const int64_t even = round_up(ceil_div(segment, std::max(cuts, int64_t(1))), int64_t(8));
    block_channels = std::min({segment, most, even});
    blocks_per_segment = ceil_div(segment, block_channels);
    blocks_per_group = group_channels / segment * blocks_per_segment;
    const int64_t fit = ranges > 1 ? 1 : std::max(kDepth / (taps * block_channels), int64_t(1));
    const int64_t share = std::max(p.groups * blocks_per_group / threads, int64_t(1));
    blocks_per_unit = std::min({fit, share, blocks_per_group});
    units_per_group = ceil_div(blocks_per_group, blocks_per_unit);
    units = p.groups * units_per_group;
  }

  int64_t blocks(const DeformConv2dParams& p) const { return p.groups * blocks_per_group; }
  int64_t slice() const { return plane * block_channels; }  // elements of a block's padded slice of one image
};

struct Block {
  int64_t index, channel, channels, offset_group;
  Block(const Layout& l, int64_t i) : index(i) {
    const int64_t within = i % l.blocks_per_segment * l.block_channels;
    channel = i / l.blocks_per_segment * l.segment + within;
    channels = std::min(l.block_channels, l.segment - within);
    offset_group = channel / l.offset_group_channels;
  }
};

struct Unit {
  int64_t index, group, first_block, last_block, channel, channels;  // [first_block, last_block)
  Unit(const Layout& l, int64_t i) : index(i), group(i / l.units_per_group) {
    const int64_t within = i % l.units_per_group * l.blocks_per_unit;
    first_block = group * l.blocks_per_group + within;
    last_block = first_block + std::min(l.blocks_per_unit, l.blocks_per_group - within);
    const Block last(l, last_block - 1);
    channel = Block(l, first_block).channel;
    channels = last.channel + last.channels - channel;
  }
};

struct TapRange {
  int64_t first, count;
  TapRange(const Layout& l, int64_t i) : first(i * l.range_taps), count(std::min(l.range_taps, l.taps - first)) {}
};

// A rectangle of output pixels of one image. Rows of its matrices (columns, product, gradient) are its pixels, taken
// down its columns: pixel (y, x) of the tile is row x * height + y.
struct Tile {
  int64_t y, x, height, width;
  int64_t pixels() const { return height * width; }
};

struct Tiling {
  int64_t out_height, out_width, width, height, strips, count;
  Tiling(const DeformConv2dParams& p, int64_t most_pixels)
      : out_height(p.out_height), out_width(p.out_width), strips(ceil_div(out_width, kTileWidth)) {
    width = ceil_div(out_width, strips);
    const int64_t bands = ceil_div(out_height, std::max(most_pixels / width, int64_t(1)));
    height = ceil_div(out_height, bands);
    strips = ceil_div(out_width, width);
    count = strips * ceil_div(out_height, height);
  }
  int64_t pixels() const { return height * width; }
  Tile operator[](int64_t i) const {
    const int64_t y = i / strips * height, x = i % strips * width;
    return {y, x, std::min(height, out_height - y), std::min(width, out_width - x)};
  }
};

}  // namespace myvision::CPU_CAPABILITY::deform_conv2d
