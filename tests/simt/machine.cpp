#include "simt/machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <vector>

#include "simt/fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim{1}, gridDim{1};

namespace simt {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr size_t kMaxVariables = 64;  // in shared memory
#if defined(SIMT_TSAN)
constexpr size_t kFiberSets = 3;  // so many blocks in turn share no fiber, whose barriers would order them
#else
constexpr size_t kFiberSets = 1;
#endif
constexpr size_t kMaxCopies = 64;  // of a thread under way

enum class State { kReady, kAtBarrier, kInCollective, kExited };
enum class Order { kForward, kReverse, kRandom, kWarp };

struct Copy {
  void* to;
  const void* from;
  void (*do_copy)(void*, const void*);
  int group;
};

struct Thread {
  int number;  // in its block
  uint3 index;
  Fiber* fiber;
  State state;
  // What it waits for.
  Location where;
  const char* operation;
  void* operands;
  // Asynchronous copies under way, and the group of the next one.
  std::vector<Copy> copies;
  int group;

  int warp() const { return number / kWarpSize; }
};

// What is released and acquired at a barrier. Two objects take turns: whoever is at the next barrier already must not
// order those who have yet to leave this one.
struct Barrier {
  char objects[2];
  size_t times_passed;

  char* object() { return &objects[times_passed % 2]; }
};

std::string place(Location where) { return std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": "; }

bool same_place(Location a, Location b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string name(const uint3& index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

std::string setting(const char* variable, const char* preset) {
  const char* value = std::getenv(variable);
  return value ? value : preset;
}

// The place of a setting's value among `known`.
int choice(const char* variable, std::initializer_list<const char*> known) {
  const std::string value = setting(variable, *known.begin());
  const auto found = std::find(known.begin(), known.end(), value);
  if (found == known.end()) throw Fault(std::string("simt: ") + variable + " is unknown: " + value);
  return static_cast<int>(found - known.begin());
}

uint3 unflatten(uint64_t number, const dim3& sizes) {
  return {static_cast<unsigned>(number % sizes.x), static_cast<unsigned>(number / sizes.x % sizes.y),
          static_cast<unsigned>(number / (uint64_t{sizes.x} * sizes.y))};
}

// Threads in the order in which they became ready.
class Queue {
 public:
  Queue() : threads_(kMaxThreads) {}
  size_t size() const { return size_; }
  Thread* operator[](size_t i) const { return threads_[(first_ + i) % kMaxThreads]; }
  void clear() { size_ = 0; }
  void push(Thread* thread) { threads_[(first_ + size_++) % kMaxThreads] = thread; }

  Thread* take(size_t i) {
    std::swap(threads_[first_], threads_[(first_ + i) % kMaxThreads]);
    Thread* thread = threads_[first_];
    first_ = (first_ + 1) % kMaxThreads;
    --size_;
    return thread;
  }

 private:
  std::vector<Thread*> threads_;
  size_t first_ = 0, size_ = 0;
};

// A block's shared memory: variables between red zones, filled with NaN.
class SharedMemory {
 public:
  SharedMemory() : memory_(static_cast<char*>(map_memory(nullptr, kBytes))) { variables_.reserve(kMaxVariables); }

  void reset() {
#if defined(SIMT_TSAN)
    map_memory(memory_, kBytes);  // forget the accesses of the block before
    used_ = kBytes;
#elif defined(SIMT_ASAN)
    __asan_unpoison_memory_region(memory_, kBytes);
#endif
    std::memset(memory_, 0xff, used_);
    used_ = kRedZone;
#if defined(SIMT_ASAN)
    __asan_poison_memory_region(memory_, kBytes);
#endif
    variables_.clear();
    variable_bytes_ = 0;
  }

  // Null where there is no room.
  void* variable(const void* key, size_t bytes, size_t alignment) {
    if (void* data = find(key)) return data;
    variable_bytes_ = (variable_bytes_ + alignment - 1) / alignment * alignment + bytes;
    return add(key, bytes, alignment);
  }
  void* dynamic(size_t bytes) {
    void* data = find(this);
    return data ? data : add(this, bytes, kDynamicAlignment);
  }

  // Of the variables that the block has come to, as a compiler places them.
  size_t variable_bytes() const { return variable_bytes_; }

 private:
  struct Variable {
    const void* key;
    void* data;
  };

  void* find(const void* key) const {
    const auto found = std::ranges::find(variables_, key, &Variable::key);
    return found == variables_.end() ? nullptr : found->data;
  }

  void* add(const void* key, size_t bytes, size_t alignment) {
    const size_t misalignment = alignment < kAlignment ? alignment : 0;  // no more aligned than promised
    const size_t start = (used_ + kAlignment - 1) / kAlignment * kAlignment + misalignment;
    if (start + bytes + kRedZone > kBytes || variables_.size() == kMaxVariables) return nullptr;
    used_ = start + bytes + kRedZone;
#if defined(SIMT_ASAN)
    __asan_unpoison_memory_region(memory_ + start, bytes);
#endif
    return variables_.emplace_back(key, memory_ + start).data;
  }

  static constexpr size_t kRedZone = 256, kAlignment = 128, kDynamicAlignment = 16, kBytes = 256 * 1024;

  char* memory_;
  size_t used_ = kBytes, variable_bytes_ = 0;
  std::vector<Variable> variables_;
};

// Nothing here is allocated while threads run: to ThreadSanitizer they would race for it.
class Machine {
 public:
  void set_dynamic_limit(const void* kernel, size_t bytes);
  void run(const void* kernel, dim3 blocks, dim3 threads, size_t dynamic_bytes, const std::function<void()>& call);
  [[noreturn]] void fault(const std::string& what, Location where);
  void barrier(Location where);
  void collective(const char* operation, void* operands, Resolve resolve, Location where);
  void warp_barrier(Location where);
  void* shared_variable(const void* key, size_t bytes, size_t alignment, Location where);
  void* dynamic_shared(size_t declared, Location where);
  Thread& running() { return *running_; }
  bool copies_at_once() const { return copies_at_once_; }

 private:
  void read_settings();
  void start_block(uint64_t block);
  void run_block();
  Thread* next_thread();
  size_t choose();
  void make_ready(Thread& thread);
  void open_barrier();
  void check_lane(const Thread& lane, const char* operation, Location where);
  Thread* lanes_of_running() { return &threads_[running_->warp() * kWarpSize]; }
  void exit_thread();
  void* checked(void* shared, Location where);
  [[noreturn]] void fail_hanging();
  void abandon();
  static void enter();

  std::mutex mutex_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  SharedMemory shared_;
  std::map<const void*, size_t> dynamic_limits_;  // of the kernels that have asked
  // Of the launch: what calls the kernel, its shared memory, how much of that all variables may take, and how much they
  // and the dynamic memory together.
  const std::function<void()>* call_ = nullptr;
  size_t dynamic_bytes_ = 0, declared_bytes_ = 0, allowed_bytes_ = 0;
  Order order_ = Order::kForward;
  bool copies_at_once_ = false;
  std::mt19937_64 random_;
  std::string fault_;

  // Of the block that runs.
  std::vector<Thread> threads_;
  Queue ready_;
  std::vector<uint64_t> warp_priority_;
  Thread* running_ = nullptr;
  size_t alive_ = 0, at_barrier_ = 0;

  // What orders threads, to ThreadSanitizer: launch and end of a kernel, barriers of the block and of each warp.
  char launch_, end_;
  struct Barriers {
    Barrier block, warp[kMaxWarps];
  };
  Barriers* barriers_ = static_cast<Barriers*>(map_memory(nullptr, sizeof(Barriers)));
};

Machine& machine() {
  static Machine machine;
  return machine;
}
thread_local const char* refused = nullptr;

bool is_valid(const dim3& blocks, const dim3& threads) {
  const uint64_t count = uint64_t{threads.x} * threads.y * threads.z;
  return blocks.x > 0 && blocks.y > 0 && blocks.z > 0 && blocks.x <= INT32_MAX && blocks.y <= UINT16_MAX &&
         blocks.z <= UINT16_MAX && count > 0 && count <= kMaxThreads && threads.z <= 64;
}

// ---- scheduling -----------------------------------------------------------------------------------------------------

void Machine::set_dynamic_limit(const void* kernel, size_t bytes) {
  const std::lock_guard lock(mutex_);
  dynamic_limits_[kernel] = bytes;
}

void Machine::run(const void* kernel, dim3 blocks, dim3 threads, size_t dynamic_bytes,
                  const std::function<void()>& call) {
  const std::lock_guard lock(mutex_);
  read_settings();
  const auto limit = dynamic_limits_.find(kernel);
  const bool has_asked = limit != dynamic_limits_.end();
  allowed_bytes_ = has_asked ? kMaxSharedBytes : kUnaskedSharedBytes;
  if (!is_valid(blocks, threads) || dynamic_bytes > std::min(allowed_bytes_, has_asked ? limit->second : SIZE_MAX)) {
    refused = "invalid launch: too many blocks, threads or bytes of shared memory, or none";
    return;
  }
  call_ = &call;
  dynamic_bytes_ = dynamic_bytes;
  declared_bytes_ = kUnaskedSharedBytes;
  gridDim = blocks;
  blockDim = threads;
  const size_t fibers = kFiberSets * threads.x * threads.y * threads.z;
  while (fibers_.size() < fibers) fibers_.push_back(std::make_unique<Fiber>());
  const uint64_t count = uint64_t{blocks.x} * blocks.y * blocks.z;
  for (uint64_t i = 0; i < count; ++i) {
    start_block(order_ == Order::kReverse ? count - 1 - i : i);
    run_block();
  }
  acquire(&end_);
}

void Machine::read_settings() {
  order_ = static_cast<Order>(choice("SIMT_ORDER", {"forward", "reverse", "random", "warp"}));
  copies_at_once_ = choice("SIMT_COPIES", {"lazy", "eager"}) == 1;
  random_.seed(std::stoull(setting("SIMT_SEED", "0")));
}

void Machine::start_block(uint64_t block) {
  blockIdx = unflatten(block, gridDim);
  shared_.reset();
#if defined(SIMT_TSAN)
  map_memory(barriers_, sizeof(Barriers));  // blocks are not ordered
#endif
  release(&launch_);
  const size_t count = size_t{blockDim.x} * blockDim.y * blockDim.z;
  threads_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = threads_[i];
    thread.number = static_cast<int>(i);
    thread.index = unflatten(i, blockDim);
    thread.state = State::kReady;
    thread.copies.clear();
    thread.copies.reserve(kMaxCopies);
    thread.group = 0;
    thread.fiber = fibers_[block % kFiberSets * count + i].get();
    thread.fiber->start(&Machine::enter);
  }
  warp_priority_.resize(count / kWarpSize + 1);
  std::generate(warp_priority_.begin(), warp_priority_.end(), std::ref(random_));
  ready_.clear();
  for (size_t i = 0; i < count; ++i) ready_.push(&threads_[order_ == Order::kReverse ? count - 1 - i : i]);
  alive_ = count;
  at_barrier_ = 0;
}

void Machine::run_block() {
  while ((running_ = next_thread())) {
    threadIdx = running_->index;
    running_->fiber->resume();
    if (!fault_.empty()) {
      abandon();
      throw Fault(std::exchange(fault_, {}));
    }
  }
  if (alive_) fail_hanging();
}

Thread* Machine::next_thread() { return ready_.size() ? ready_.take(choose()) : nullptr; }

size_t Machine::choose() {
  if (order_ == Order::kRandom) return random_() % ready_.size();
  size_t chosen = 0;
  for (size_t i = 1; order_ == Order::kWarp && i < ready_.size(); ++i) {
    if (warp_priority_[ready_[i]->warp()] > warp_priority_[ready_[chosen]->warp()]) chosen = i;
  }
  return chosen;
}

void Machine::make_ready(Thread& thread) {
  thread.state = State::kReady;
  ready_.push(&thread);
}

// A fiber's whole life.
void Machine::enter() {
  Machine& self = machine();
  self.running_->fiber->arrive();
  acquire(&self.launch_);
  (*self.call_)();
  self.exit_thread();
}

void Machine::exit_thread() {
  release(&end_);
  running_->state = State::kExited;
  --alive_;
  if (alive_ > 0 && at_barrier_ == alive_) open_barrier();
  running_->fiber->suspend();
}

// ---- what stops a kernel --------------------------------------------------------------------------------------------

void Machine::fault(const std::string& what, Location where) {
  fault_ = place(where) + what + ", thread " + name(running_->index) + " of block " + name(blockIdx);
  running_->fiber->suspend();
  std::abort();  // nobody resumes it
}

void Machine::fail_hanging() {
  const auto waiting = std::ranges::find_if(threads_, [](const Thread& t) { return t.state != State::kExited; });
  const std::string what = waiting->state == State::kAtBarrier ? "__syncthreads" : waiting->operation;
  const std::string text = place(waiting->where) + "hang: " + std::to_string(alive_) + " of " +
                           std::to_string(threads_.size()) + " threads wait in vain, one of them in " + what +
                           ", thread " + name(waiting->index) + " of block " + name(blockIdx);
  abandon();
  throw Fault(text);
}

// Leaves the threads where they are: their stacks, and what the sanitizers know of them, are of no more use.
void Machine::abandon() {
  for (Thread& thread : threads_) thread.fiber->release(&end_);
  acquire(&end_);
  fibers_.clear();
}

// ---- barriers and collectives ---------------------------------------------------------------------------------------

void Machine::barrier(Location where) {
  char* object = barriers_->block.object();
  release(object);
  running_->state = State::kAtBarrier;
  running_->where = where;
  if (++at_barrier_ == alive_) open_barrier();
  running_->fiber->suspend();
  acquire(object);
}

void Machine::open_barrier() {
  const Thread* first = nullptr;
  for (Thread& thread : threads_) {
    if (thread.state != State::kAtBarrier) continue;
    if (!first) first = &thread;
    if (!same_place(first->where, thread.where)) {
      fault("divergent barriers: thread " + name(first->index) + " waits in __syncthreads of line " +
                std::to_string(first->where.line()) + ", thread " + name(thread.index) + " in that of line " +
                std::to_string(thread.where.line()),
            first->where);
    }
  }
  ++barriers_->block.times_passed;
  for (Thread& thread : threads_) {
    if (thread.state == State::kAtBarrier) make_ready(thread);
  }
  at_barrier_ = 0;
}

void Machine::warp_barrier(Location where) {
  Barrier& barrier = barriers_->warp[running_->warp()];
  char* object = barrier.object();
  release(object);
  collective("sync_warp", &barrier, [](void* const* lanes) { ++static_cast<Barrier*>(lanes[0])->times_passed; }, where);
  acquire(object);
}

void Machine::collective(const char* operation, void* operands, Resolve resolve, Location where) {
  running_->operation = operation;
  running_->operands = operands;
  running_->where = where;
  Thread* const first = lanes_of_running();
  if (first + kWarpSize > threads_.data() + threads_.size()) {
    fault(std::string(operation) + " in a warp of less than " + std::to_string(kWarpSize) + " lanes: the block has " +
              std::to_string(threads_.size()) + " threads",
          where);
  }
  running_->state = State::kInCollective;
  void* all[kWarpSize];
  bool complete = true;
  for (int i = 0; i < kWarpSize; ++i) {
    check_lane(first[i], operation, where);
    complete = complete && first[i].state == State::kInCollective;
    all[i] = first[i].operands;
  }
  if (!complete) return running_->fiber->suspend();
  resolve(all);
  running_->state = State::kReady;
  for (int i = 0; i < kWarpSize; ++i) {
    if (&first[i] != running_) make_ready(first[i]);
  }
}

void Machine::check_lane(const Thread& lane, const char* operation, Location where) {
  const bool diverged = lane.state == State::kInCollective && !same_place(lane.where, where);
  if (lane.state != State::kExited && !diverged) return;
  const std::string who = "lane " + std::to_string(lane.number % kWarpSize) + " of its warp ";
  if (!diverged) fault(std::string(operation) + " in vain: " + who + "has exited", where);
  fault(std::string("divergent warp: ") + operation + ", while " + who + "is in " + lane.operation + " of line " +
            std::to_string(lane.where.line()),
        where);
}

// ---- shared memory --------------------------------------------------------------------------------------------------

void* Machine::shared_variable(const void* key, size_t bytes, size_t alignment, Location where) {
  return checked(shared_.variable(key, bytes, alignment), where);
}

void* Machine::dynamic_shared(size_t declared, Location where) {
  declared_bytes_ = declared;
  return checked(shared_.dynamic(dynamic_bytes_), where);
}

// A compiler knows a kernel's variables, and a GPU refuses the launch; here they are known as threads come to them.
void* Machine::checked(void* shared, Location where) {
  const size_t variables = shared_.variable_bytes();
  if (variables > declared_bytes_) {
    fault("the kernel's shared variables take " + std::to_string(variables) + " bytes, where it declares " +
              std::to_string(declared_bytes_),
          where);
  }
  if (variables + dynamic_bytes_ > allowed_bytes_) {
    fault("invalid launch: " + std::to_string(dynamic_bytes_) + " bytes of dynamic shared memory and " +
              std::to_string(variables) + " of shared variables, where the kernel may have " +
              std::to_string(allowed_bytes_),
          where);
  }
  if (!shared) fault("the block's shared memory is full", where);
  return shared;
}

}  // namespace

// ---- the interface --------------------------------------------------------------------------------------------------

void set_dynamic_shared_limit(const void* kernel, size_t bytes) { machine().set_dynamic_limit(kernel, bytes); }

void run(const void* kernel, dim3 blocks, dim3 threads, size_t dynamic_shared_bytes,
         const std::function<void()>& call) {
  machine().run(kernel, blocks, threads, dynamic_shared_bytes, call);
}

const char* launch_error() { return std::exchange(refused, nullptr); }

void check_alignment(const void* data, size_t alignment, Location caller) {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment == 0) return;
  machine().fault("misaligned address: this access needs a multiple of " + std::to_string(alignment), caller);
}

void barrier(Location caller) { machine().barrier(caller); }

void warp_barrier(Location caller) { machine().warp_barrier(caller); }

void* shared_variable(const void* key, size_t bytes, size_t alignment, Location caller) {
  return machine().shared_variable(key, bytes, alignment, caller);
}
void* dynamic_shared(size_t declared, Location caller) { return machine().dynamic_shared(declared, caller); }

int lane() { return machine().running().number % kWarpSize; }

void collective(const char* operation, void* operands, Resolve resolve, Location caller) {
  machine().collective(operation, operands, resolve, caller);
}

void copy_async(void* to, const void* from, void (*do_copy)(void*, const void*), Location caller) {
  if (machine().copies_at_once()) return do_copy(to, from);
  Thread& thread = machine().running();
  if (thread.copies.size() == kMaxCopies) machine().fault("too many asynchronous copies under way", caller);
  thread.copies.push_back({to, from, do_copy, thread.group});
}

void commit_copies() { ++machine().running().group; }

void wait_for_copies(int pending_groups) {
  Thread& thread = machine().running();
  std::erase_if(thread.copies, [&](const Copy& copy) {
    const bool due = copy.group < thread.group - pending_groups;
    if (due) copy.do_copy(copy.to, copy.from);
    return due;
  });
}

}  // namespace simt
