// SPDX-License-Identifier: MIT
// Threads of a block as fibers of one thread of the host. Each runs until it waits for others, or
// gives way by chance; the order of warps is drawn anew each time, so that what a kernel forgot to
// wait for is not always there already. FATHOM_EMULATION_SEED chooses another order.
#include "cuda_emulation/emulator.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#ifndef __x86_64__
#error "SwitchFiber is written for x86-64"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Saves what a call must preserve and the stack, goes on where to_stack was saved. swapcontext
// would do, at a system call for each of the millions of switches.
extern "C" void SwitchFiber(void** from_stack, void* to_stack);
asm(R"(
.text
.type SwitchFiber, @function
SwitchFiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size SwitchFiber, .-SwitchFiber
)");

namespace fathom::emulation {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStack = 64 * 1024;  // of a fiber, its lowest page a guard
constexpr int kMostThreads = 1024;
constexpr std::size_t kMostShared = 227 * 1024;  // of compute capability 9.0
constexpr std::size_t kPlainShared = 48 * 1024;  // without asking for more
constexpr std::size_t kSharedAlignment = 128;
constexpr int kSharedPattern = 0xA5;

enum class State { kReady, kAtBlockBarrier, kAtExchange, kDone };

struct Fiber {
  void* stack;
  State state;
  unsigned waits_in;  // the generation of what it waits for
  bool waited;        // for the kernel before
};

// What a lane has of a and b of a matrix product: words of bytes, or halves as single numbers.
using Operands = std::array<std::uint32_t, 6>;
using HalfOperands = std::array<float, 12>;

// Two generations of an exchange: the slowest lane may still read one while others fill the next.
struct Warp {
  std::uint64_t slots[2][32];
  int arrived;
  unsigned generation;
  std::array<Operands, 32> operands[2];
  std::array<HalfOperands, 32> halves[2];
};

// Memory whose end is followed by a page that faults.
unsigned char* Guarded(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) Fail("no memory for %zu bytes", bytes);
  auto* first = static_cast<unsigned char*>(memory);
  mprotect(first + bytes, kPage, PROT_NONE);
  return first;
}

class Block {
 public:
  static Block& Get() {
    static Block block;
    return block;
  }

  void RunGrid(dim3 grid, int threads, std::size_t shared, const std::function<void()>& body,
               bool follows, cudaStream_t stream);

  Votes Sync(bool vote);
  const std::uint64_t* Exchange(std::uint64_t value);
  void MaybeYield() {
    if (random_() % 256 == 0) Yield();
  }
  Warp& warp() { return warps_[static_cast<std::size_t>(current_ / 32)]; }
  bool HasWaited() { return fiber().waited; }
  void WaitForPrevious() { fiber().waited = true; }
  void LetNextBegin() { n_waited_first_ += fiber().waited ? 1 : 0; }
  void WorkBeside() {
    if (fiber().waited) return;
    works_beside_ = true;
    if (!lets_beside_[stream_]) Fail("a kernel works beside one that has not waited first");
  }
  bool DrawsOne() { return random_() % 4 == 0; }
  unsigned char* dynamic() const { return dynamic_; }
  std::size_t dynamic_bytes() const { return dynamic_bytes_; }

 private:
  Block();
  static void Entry();

  void Run(int threads);
  bool RunWarp(int warp);
  bool IsReady(Fiber* fiber);
  void StartFiber(int thread);
  bool SwitchToNextLane();
  void Yield() { SwitchFiber(&fiber().stack, scheduler_stack_); }
  void Wait(State state, unsigned generation) {
    fiber().state = state;
    fiber().waits_in = generation;
    if (!SwitchToNextLane()) Yield();
  }
  void ReleaseBarrier();
  void SetCurrent(int thread) {
    current_ = thread;
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
  }
  Fiber& fiber() { return fibers_[static_cast<std::size_t>(current_)]; }

  unsigned char* stacks_;
  unsigned char* shared_end_;
  unsigned char* dynamic_ = nullptr;
  std::size_t dynamic_bytes_ = 0;
  void* scheduler_stack_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  bool follows_ = false;
  cudaStream_t stream_ = nullptr;
  std::int64_t n_waited_first_ = 0;  // threads that then let the next one begin
  bool works_beside_ = false;
  std::unordered_map<cudaStream_t, bool> lets_beside_;  // the last kernel of a stream
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  int current_ = 0;
  int alive_ = 0;
  int arrived_ = 0;          // at the barrier of the block
  unsigned generation_ = 0;  // of that barrier
  Votes votes_[2] = {};      // of this generation and the one before
  std::minstd_rand random_;
};

Block::Block()
    : stacks_(Guarded(kStack * kMostThreads)), shared_end_(Guarded(kPage * 64) + kPage * 64) {
  static_assert(kPage * 64 >= kMostShared);
  for (int i = 0; i < kMostThreads; ++i) {
    mprotect(stacks_ + static_cast<std::size_t>(i) * kStack, kPage, PROT_NONE);
  }
  const char* seed = std::getenv("FATHOM_EMULATION_SEED");
  random_.seed(seed == nullptr ? 1 : static_cast<unsigned>(std::strtoul(seed, nullptr, 10)));
}

void Block::Entry() {
  Block& block = Get();
  (*block.body_)();
  if (!block.HasWaited()) Fail("a thread ends without having waited for the kernel before");
  block.fiber().state = State::kDone;
  --block.alive_;
  block.ReleaseBarrier();  // threads that have left are not waited for
  block.Yield();
  Fail("a thread went on after its end");
}

void Block::StartFiber(int thread) {
  auto* top =
      reinterpret_cast<std::uint64_t*>(stacks_ + (static_cast<std::size_t>(thread) + 1) * kStack);
  // As SwitchFiber leaves a stack, aligned as a call of Entry would have it.
  top -= 2;
  *top = reinterpret_cast<std::uint64_t>(&Entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fibers_[static_cast<std::size_t>(thread)] = {top, State::kReady, 0, !follows_};
}

bool Block::IsReady(Fiber* f) {
  if (f->state == State::kAtBlockBarrier && generation_ != f->waits_in) f->state = State::kReady;
  if (f->state == State::kAtExchange && warp().generation != f->waits_in) f->state = State::kReady;
  return f->state == State::kReady;
}

// From a thread that waits to the next of its warp that need not: what RunWarp would do, at half
// the switches. False if there is none; when this thread runs again, it need not wait any more.
bool Block::SwitchToNextLane() {
  Fiber& own = fiber();
  const int last = current_ | 31;
  for (int thread = current_ + 1; thread <= last; ++thread) {
    Fiber& next = fibers_[static_cast<std::size_t>(thread)];
    if (!IsReady(&next)) continue;
    SetCurrent(thread);
    SwitchFiber(&own.stack, next.stack);
    return true;
  }
  return false;
}

// Lanes in turn until all of them wait, or others are let run first. Whether any lane ran.
bool Block::RunWarp(int warp) {
  bool any = false;
  for (bool more = true; more;) {
    more = false;
    for (int lane = 0; lane < 32; ++lane) {
      SetCurrent(warp * 32 + lane);
      if (!IsReady(&fiber())) continue;
      any = more = true;
      SwitchFiber(&scheduler_stack_, fiber().stack);
    }
    if (random_() % 8 == 0) break;
  }
  return any;
}

void Block::Run(int threads) {
  std::memset(dynamic_, kSharedPattern, dynamic_bytes_);
  const int n_warps = threads / 32;
  warps_.assign(static_cast<std::size_t>(n_warps), Warp{});
  fibers_.resize(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) StartFiber(i);
  alive_ = threads;
  arrived_ = 0;
  generation_ = 0;
  votes_[0] = votes_[1] = {0, false, true};
  std::vector<int> order(static_cast<std::size_t>(n_warps));
  std::iota(order.begin(), order.end(), 0);
  while (alive_ > 0) {
    std::shuffle(order.begin(), order.end(), random_);
    bool any = false;
    for (const int warp : order) any = RunWarp(warp) || any;
    if (!any) {
      Fail(
          "deadlock in block (%u, %u, %u): of %d threads %d are left, %d of them at a barrier of "
          "the block; the others wait for lanes of their warps",
          blockIdx.x, blockIdx.y, blockIdx.z, threads, alive_, arrived_);
    }
  }
}

void Block::RunGrid(dim3 grid, int threads, std::size_t shared, const std::function<void()>& body,
                    bool follows, cudaStream_t stream) {
  gridDim = grid;
  blockDim = dim3(static_cast<unsigned>(threads));
  body_ = &body;
  follows_ = follows;
  stream_ = stream;
  n_waited_first_ = 0;
  works_beside_ = false;
  dynamic_bytes_ = (shared + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  dynamic_ = shared_end_ - dynamic_bytes_;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        Run(threads);
      }
    }
  }
  const std::int64_t all = std::int64_t{threads} * grid.x * grid.y * grid.z;
  lets_beside_[stream] = works_beside_ || n_waited_first_ == all;
}

void Block::ReleaseBarrier() {
  if (alive_ == 0 || arrived_ != alive_) return;
  arrived_ = 0;
  ++generation_;
  votes_[generation_ % 2] = {0, false, true};
}

Votes Block::Sync(bool vote) {
  const unsigned generation = generation_;
  Votes& votes = votes_[generation % 2];
  votes.count += vote ? 1 : 0;
  votes.any = votes.any || vote;
  votes.all = votes.all && vote;
  ++arrived_;
  ReleaseBarrier();
  if (generation_ == generation) Wait(State::kAtBlockBarrier, generation);
  return votes;
}

const std::uint64_t* Block::Exchange(std::uint64_t value) {
  Warp& w = warp();
  const unsigned generation = w.generation;
  std::uint64_t* slots = w.slots[generation % 2];
  slots[current_ % 32] = value;
  if (++w.arrived == 32) {
    w.arrived = 0;
    ++w.generation;
  } else {
    Wait(State::kAtExchange, generation);
  }
  return slots;
}

std::unordered_map<const void*, std::size_t>& SharedLimits() {
  static std::unordered_map<const void*, std::size_t> limits;
  return limits;
}

float HalfOf(std::uint32_t word, std::size_t i) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(word >> (16 * i));
  return __half2float(__half(raw));
}

// The operands of all lanes, once they have put them into `of_warp`, one of the arrays of a Warp.
template <typename T>
const std::array<T, 32>& AllOperands(std::array<T, 32> (&of_warp)[2], const T& own) {
  std::array<T, 32>& all = of_warp[Block::Get().warp().generation % 2];
  all[static_cast<std::size_t>(Lane())] = own;
  Exchange(0);
  return all;
}

}  // namespace

void Fail(const char* format, ...) {
  std::fputs("CUDA emulation: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

cudaError_t SetKernelAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > kMostShared) return cudaErrorInvalidValue;
  SharedLimits()[kernel] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

void Launch(const void* kernel, dim3 grid, int threads, std::size_t shared, cudaStream_t stream,
            std::function<void()> body, bool follows) {
  const auto limit = SharedLimits().find(kernel);
  const bool fits =
      shared <= kPlainShared || (limit != SharedLimits().end() && shared <= limit->second);
  const bool is_grid = grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7FFFFFFF &&
                       grid.y <= 65535 && grid.z <= 65535;
  if (!is_grid || threads <= 0 || threads > kMostThreads || !fits) {
    SetLastError(fits ? cudaErrorInvalidConfiguration : cudaErrorInvalidValue);
    return;
  }
  if (threads % 32 != 0) Fail("blocks of %d threads are not emulated", threads);
  Enqueue(stream, [=, work = std::move(body)] {
    Block::Get().RunGrid(grid, threads, shared, work, follows, stream);
  });
}

bool DrawsOne() { return Block::Get().DrawsOne(); }
Votes SyncBlock(bool vote) { return Block::Get().Sync(vote); }
void WaitForPrevious() { Block::Get().WaitForPrevious(); }
void LetNextBegin() { Block::Get().LetNextBegin(); }
void WorkBeside() { Block::Get().WorkBeside(); }
void MaybeYield() { Block::Get().MaybeYield(); }
const std::uint64_t* Exchange(std::uint64_t value) { return Block::Get().Exchange(value); }

unsigned char* DynamicShared() { return Block::Get().dynamic(); }

unsigned SharedAddress(const void* p) {
  const std::ptrdiff_t offset = static_cast<const unsigned char*>(p) - DynamicShared();
  if (offset < 0 || static_cast<std::size_t>(offset) > Block::Get().dynamic_bytes()) {
    Fail("addresses of static shared memory are not emulated");
  }
  return static_cast<unsigned>(offset);
}

void CopyAsync(unsigned to, const void* from, int bytes) {
  if (to % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) Fail("misaligned cp.async");
  std::memset(DynamicShared() + to, 0, 16);
  std::memcpy(DynamicShared() + to, from, static_cast<std::size_t>(bytes));
}

void LoadMatrices(bool transposed, const std::array<std::uint32_t*, 4>& to, unsigned row) {
  if (row % 16 != 0) Fail("misaligned ldmatrix");
  const std::uint64_t* rows = Exchange(row);
  const auto group = static_cast<std::size_t>(Lane() / 4),
             pair = static_cast<std::size_t>(Lane() % 4);
  const auto half = [&](std::size_t matrix, std::size_t r, std::size_t c) -> std::uint32_t {
    std::uint16_t value = 0;
    std::memcpy(&value, DynamicShared() + rows[8 * matrix + r] + 2 * c, sizeof(value));
    return value;
  };
  for (std::size_t i = 0; i < 4; ++i) {
    const std::uint32_t low = transposed ? half(i, 2 * pair, group) : half(i, group, 2 * pair);
    const std::uint32_t high =
        transposed ? half(i, 2 * pair + 1, group) : half(i, group, 2 * pair + 1);
    *to[i] = low | high << 16;
  }
}

// A lane has four results: i = 0, 1 of row g, columns 2t and 2t + 1, and i = 2, 3 of row g + 8. Of
// a it holds rows g and g + 8 in words 0, 2 and 1, 3.
void MmaBytes(bool a_signed, const std::array<int*, 4>& d, const std::array<std::uint32_t, 4>& a,
              const std::array<std::uint32_t, 2>& b, const std::array<int, 4>& c) {
  const std::array<Operands, 32>& all =
      AllOperands(Block::Get().warp().operands, {a[0], a[1], a[2], a[3], b[0], b[1]});
  const auto lane = static_cast<std::size_t>(Lane());
  for (std::size_t i = 0; i < 4; ++i) {
    const Operands* row = &all[lane / 4 * 4];
    const Operands* column = &all[(2 * (lane % 4) + i % 2) * 4];
    int sum = c[i];
    for (std::size_t k = 0; k < 32; ++k) {
      const std::uint32_t x = row[k % 16 / 4][i / 2 + k / 16 * 2] >> (k % 4 * 8);
      const std::uint32_t y = column[k % 16 / 4][4 + k / 16] >> (k % 4 * 8);
      const int left = a_signed ? static_cast<std::int8_t>(x) : static_cast<std::uint8_t>(x);
      sum += left * static_cast<std::int8_t>(y);
    }
    *d[i] = sum;
  }
}

void MmaHalves(const std::array<float*, 4>& d, const std::array<std::uint32_t, 4>& a,
               const std::array<std::uint32_t, 2>& b, const std::array<float, 4>& c) {
  HalfOperands own;
  for (std::size_t i = 0; i < 8; ++i) own[i] = HalfOf(a[i / 2], i % 2);
  for (std::size_t i = 0; i < 4; ++i) own[8 + i] = HalfOf(b[i / 2], i % 2);
  const std::array<HalfOperands, 32>& all = AllOperands(Block::Get().warp().halves, own);
  const auto lane = static_cast<std::size_t>(Lane());
  std::array<float, 4> sums = c;
  for (std::size_t k = 0; k < 16; ++k) {  // outside, so that sums need not wait for each other
    for (std::size_t i = 0; i < 4; ++i) {
      const HalfOperands& row = all[lane / 4 * 4 + k % 8 / 2];
      const HalfOperands& column = all[(2 * (lane % 4) + i % 2) * 4 + k % 8 / 2];
      sums[i] += row[2 * (i / 2 + k / 8 * 2) + k % 2] * column[8 + k / 8 * 2 + k % 2];
    }
  }
  for (std::size_t i = 0; i < 4; ++i) *d[i] = sums[i];
}

}  // namespace fathom::emulation
