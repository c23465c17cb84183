// Matrix products of any size for one instruction set: the tile of gemm.h under blocks that stay in the caches, on all
// threads. Compiled once per set.
//
// The caller's functions pack what is multiplied, and so may convert or compute it on the way; another one gets what
// comes out, a block at a time, while that is in the cache. Every number is summed in one order, that of the depth in
// blocks of kDepth, whatever the number of rows, columns and threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/gemm.h"
#include "common/parallel.h"
#include "common/workspace.h"

namespace myvision::CPU_CAPABILITY {

struct ProductSize {
  int64_t rows, columns, depth;
};

template <typename... Args>
class FunctionRef {
 public:
  template <typename Function>
  FunctionRef(const Function& function)
      : function_(&function),
        call_([](const void* function, Args... args) { (*static_cast<const Function*>(function))(args...); }) {}
  void operator()(Args... args) const { call_(function_, args...); }

 private:
  const void* function_;
  void (*call_)(const void*, Args...);
};

template <typename T>
class Product {
 public:
  static constexpr int64_t kRows = GemmTile<T>::kRows, kCols = GemmTile<T>::kCols;
  // A panel of the right operand stays in L1, a block of the left one and one of the result in L2.
  static constexpr int64_t kDepth = 384 * sizeof(float) / sizeof(T);
  static constexpr int64_t kBlockRows = 12 * kRows, kGroup = 1024 / kCols;  // panels that a block of the left one meets
  // Where strips of the left operand begin: a strip may be written a vector at a time, beyond its end.
  static constexpr int64_t kStrip = kRows * kDepth + at::vec::Vectorized<T>::size();

  // pack_left(row, rows, k, depth, column, to): row + i of the left operand at depth k + j goes to
  // to[i / kRows * kStrip + j * kRows + i % kRows]. Rows are a multiple of kRows but for the last ones; depth <=
  // kDepth. `column` is the first one of the result that the block is for: each row is asked for once with column 0, by
  // one thread, in the order of depths.
  using PackLeft = FunctionRef<int64_t, int64_t, int64_t, int64_t, int64_t, T*>;
  // pack_right(k, depth, column, columns, to): the right operand's (k + j, column + i) goes to to[j * kCols + i], zero
  // where columns <= i < kCols.
  using PackRight = FunctionRef<int64_t, int64_t, int64_t, int64_t, T*>;
  // finish(row, rows, column, columns, from): the result's (row + i, column + j) stands at from[i * kCols + j].
  using Finish = FunctionRef<int64_t, int64_t, int64_t, int64_t, const T*>;

  Product(const ProductSize& size, const PackLeft& left, const PackRight& right, const Finish& finish)
      : size_(size), left_(left), right_(right), finish_(finish) {}

  void run() const {
    if (size_.rows == 0 || size_.columns == 0) return;
    if (size_.rows <= kFewBlocks * kBlockRows &&
        left_size(size_.rows, size_.depth) <= kSharedBytes / int64_t(sizeof(T)))
      run_few_rows();
    else
      run_many_rows();
  }

 private:
  static constexpr int64_t kFewBlocks = 4;
  // Memory beside the matrices, of which a thread takes 8 MB at most: what all threads read, a thread; that in all; and
  // what a thread keeps of the left operand.
  static constexpr int64_t kSharedBytes = int64_t(11) << 19, kMostSharedBytes = int64_t(24) << 20;
  static constexpr int64_t kKeptBytes = int64_t(7) << 18;

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
  static int64_t blocks_of(int64_t depth) { return std::max<int64_t>(ceil_div(depth, kDepth), 1); }
  static int64_t left_size(int64_t rows, int64_t depth) { return ceil_div(rows, kRows) * kStrip * blocks_of(depth); }

  // c[rows][kCols] (+)= strips of the left operand * a panel of the right one. The first strips fetch the panel that
  // comes next into L2, a line of each of its rows with a strip; null where there is none.
  static void multiply(const T* left, const T* panel, int64_t rows, int64_t depth, T* c, bool accumulate,
                       const T* next) {
    [[maybe_unused]] constexpr int64_t kLine = 64 / sizeof(T);
#if defined(CPU_CAPABILITY_AVX2)  // whose tile of floats has no place for that
    constexpr int64_t kFetching = 0;
#else
    constexpr int64_t kFetching = kCols / kLine;
#endif
    for (int64_t i = 0; i < rows; i += kRows, left += kStrip, c += kRows * kCols) {
      const GemmLeft<T> a{left, 1, kRows};
      const GemmRight<T> b{panel, kCols};
      if constexpr (kFetching > 0) {
        if (next && i < kFetching * kRows && i + kRows <= rows) {
          gemm_tile<T, kRows, true>(a, b, depth, c, kCols, accumulate, next + i / kRows * kLine);
          continue;
        }
      }
      gemm_panel<T>(a, b, std::min(kRows, rows - i), depth, c, kCols, accumulate);
    }
  }

  // The left operand is packed for all threads; each packs the panels of the right one that it takes, into L1.
  void run_few_rows() const {
    const auto [rows, columns, depth] = size_;
    const int64_t threads = num_threads(), panels = ceil_div(columns, kCols), depth_blocks = blocks_of(depth);
    const int64_t strips = ceil_div(rows, kRows);
    const Workspace packed(left_size(rows, depth) * sizeof(T));
    T* const left = packed.as<T>();
    parallel_for(0, strips, ceil_div(kGrain, kStrip * depth_blocks), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        for (int64_t block = 0; block < depth_blocks; ++block) {
          const int64_t row = i * kRows, k = block * kDepth;
          left_(row, std::min(kRows, size_.rows - row), k, std::min(kDepth, size_.depth - k), 0,
                left + (block * strips + i) * kStrip);
        }
    });
    // Where there are fewer panels than threads want, rows are cut as well.
    const int64_t cuts = threads == 1 ? 1 : std::min(ceil_div(2 * threads, panels), strips);
    const int64_t cut = ceil_div(strips, cuts) * kRows, tasks = ceil_div(rows, cut) * panels;
    parallel_tasks(workers_for(tasks), tasks, [&](int64_t task, int64_t) {
      const int64_t column = task % panels * kCols, row = task / panels * cut;
      const int64_t count = std::min(cut, size_.rows - row), wide = std::min(kCols, size_.columns - column);
      const Workspace buffers((kDepth + cut) * kCols * sizeof(T));
      T *const panel = buffers.as<T>(), *const c = panel + kDepth * kCols;
      for (int64_t block = 0; block < depth_blocks; ++block) {
        const int64_t k = block * kDepth, deep = std::min(kDepth, size_.depth - k);
        right_(k, deep, column, wide, panel);
        multiply(left + (block * strips + row / kRows) * kStrip, panel, count, deep, c, block > 0, nullptr);
      }
      finish_(row, count, column, wide, c);
    });
  }

  // The right operand is packed for all threads, as much of it at a time as kSharedBytes hold; each thread packs the
  // blocks of the left one that it takes.
  void run_many_rows() const {
    const int64_t shared = std::min(kSharedBytes * num_threads(), kMostSharedBytes) / int64_t(sizeof(T));
    const int64_t most_panels = shared / (kDepth * kCols);  // of kDepth, that are shared
    const int64_t panels = ceil_div(size_.columns, kCols), depth_blocks = blocks_of(size_.depth);
    if (depth_blocks * std::min(panels, kGroup) <= most_panels) {
      const int64_t step = even_step(panels, most_panels / depth_blocks);
      const Workspace packed(step * depth_blocks * kDepth * kCols * sizeof(T));
      for (int64_t panel = 0; panel < panels; panel += step) {
        const int64_t count = std::min(step, panels - panel);
        pack_panels(panel, count, 0, depth_blocks, packed.as<T>());
        multiply_rows({0, size_.rows, panel, count, 0, depth_blocks}, packed.as<T>(), nullptr);
      }
      return;
    }
    // The depth is cut as well: sums wait in memory until the next part of it. Half of what is shared is theirs.
    const int64_t column_step = std::min(panels, kGroup);
    const int64_t depth_step = std::max<int64_t>(most_panels / 2 / column_step, 1);
    const int64_t row_step = std::max<int64_t>(shared / 2 / (column_step * kCols) / kBlockRows, 1) * kBlockRows;
    const Workspace packed(column_step * depth_step * kDepth * kCols * sizeof(T));
    const Workspace sums(column_step * kCols * (std::min(row_step, size_.rows) + kBlockRows) * sizeof(T));
    for (int64_t row = 0; row < size_.rows; row += row_step)
      for (int64_t panel = 0; panel < panels; panel += column_step)
        for (int64_t block = 0; block < depth_blocks; block += depth_step) {
          const Part part{row,   std::min(row_step, size_.rows - row),
                          panel, std::min(column_step, panels - panel),
                          block, std::min(depth_step, depth_blocks - block)};
          pack_panels(part.panel, part.panels, block, part.depth_blocks, packed.as<T>());
          multiply_rows(part, packed.as<T>(), sums.as<T>());
        }
  }

  // What is multiplied between two packings of the right operand.
  struct Part {
    int64_t row, rows, panel, panels, depth_block, depth_blocks;
  };

  static constexpr int64_t kGrain = 32768;  // elements that are worth a thread

  // Work is worth threads of its own from a few microseconds on.
  int64_t workers_for(int64_t tasks) const {
    const double work = double(size_.rows) * double(size_.columns) * double(std::max<int64_t>(size_.depth, 1));
    return std::min(work < 1e5 ? 1 : num_threads(), tasks);
  }

  // Parts of at most so many that differ little.
  static int64_t even_step(int64_t count, int64_t most) { return ceil_div(count, ceil_div(count, most)); }

  void pack_panels(int64_t panel, int64_t panels, int64_t first_block, int64_t blocks, T* to) const {
    parallel_for(0, panels * blocks, ceil_div(kGrain, kDepth * kCols), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t column = (panel + i / blocks) * kCols, k = (first_block + i % blocks) * kDepth;
        right_(k, std::min(kDepth, size_.depth - k), column, std::min(kCols, size_.columns - column),
               to + i * kDepth * kCols);
      }
    });
  }

  // Rows are cut into blocks, panels into groups. A task is a block of rows and all groups, or one of them.
  struct Cut {
    int64_t block_rows, group, row_blocks, groups, groups_a_task;
  };

  static Cut cut(const Part& part) {
    const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();  // tasks, so that none waits long for the last
    int64_t row_blocks = ceil_div(part.rows, kBlockRows), groups = ceil_div(part.panels, kGroup);
    const bool enough_rows = row_blocks >= wanted;
    while (row_blocks * groups < wanted && groups < part.panels) ++groups;
    while (row_blocks * groups < wanted && row_blocks < ceil_div(part.rows, kRows)) ++row_blocks;
    const int64_t block_rows = ceil_div(ceil_div(part.rows, row_blocks), kRows) * kRows;
    const int64_t group = ceil_div(part.panels, groups);
    groups = ceil_div(part.panels, group);
    return {block_rows, group, ceil_div(part.rows, block_rows), groups, enough_rows ? groups : 1};
  }

  // `sums` is null where the whole depth is here.
  void multiply_rows(const Part& part, const T* packed, T* sums) const {
    const Cut cut = Product::cut(part);
    const int64_t left_size = ceil_div(cut.block_rows, kRows) * kStrip, c_size = cut.block_rows * kCols;
    // A block of rows that meets several groups is packed once, if it fits.
    const bool keeps = cut.groups_a_task > 1 && left_size * part.depth_blocks * int64_t(sizeof(T)) <= kKeptBytes;
    const int64_t lefts = keeps ? part.depth_blocks : 1, tasks = cut.row_blocks * cut.groups / cut.groups_a_task;
    parallel_tasks(workers_for(tasks), tasks, [&](int64_t task, int64_t) {
      const int64_t row = part.row + task % cut.row_blocks * cut.block_rows;
      const int64_t rows = std::min(cut.block_rows, part.row + part.rows - row);
      const Workspace buffers((lefts * left_size + (sums ? 0 : cut.group * c_size)) * sizeof(T));
      T* const left = buffers.as<T>();
      const int64_t first_group = task / cut.row_blocks * cut.groups_a_task;
      for (int64_t i = 0; i < cut.groups_a_task; ++i) {
        const int64_t first = (first_group + i) * cut.group, panels = std::min(cut.group, part.panels - first);
        T* const c = sums ? sums + (row - part.row) * part.panels * kCols + first * c_size : left + lefts * left_size;
        for (int64_t block = 0; block < part.depth_blocks; ++block) {
          const int64_t k = (part.depth_block + block) * kDepth, depth = std::min(kDepth, size_.depth - k);
          T* const strips = left + (keeps ? block * left_size : 0);
          if (i == 0 || !keeps) left_(row, rows, k, depth, (part.panel + first) * kCols, strips);
          const int64_t step = part.depth_blocks * kDepth * kCols;  // from panel to panel
          const T* const panel = packed + first * step + block * kDepth * kCols;
          for (int64_t j = 0; j < panels; ++j)
            multiply(strips, panel + j * step, rows, depth, c + j * c_size, k > 0,
                     j + 1 < panels ? panel + (j + 1) * step : nullptr);
        }
        if ((part.depth_block + part.depth_blocks) * kDepth >= size_.depth)
          finish_panels(row, rows, part.panel + first, panels, c, c_size);
      }
    });
  }

  // Row by row, so that memory is written a page after the other.
  void finish_panels(int64_t row, int64_t rows, int64_t panel, int64_t panels, const T* c, int64_t c_size) const {
    for (int64_t i = 0; i < rows; i += kRows)
      for (int64_t j = 0; j < panels; ++j) {
        const int64_t column = (panel + j) * kCols;
        finish_(row + i, std::min(kRows, rows - i), column, std::min(kCols, size_.columns - column),
                c + j * c_size + i * kCols);
      }
  }

  ProductSize size_;
  PackLeft left_;
  PackRight right_;
  Finish finish_;
};

}  // namespace myvision::CPU_CAPABILITY
