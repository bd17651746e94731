// SPDX-License-Identifier: MIT
// The part of the CUDA runtime that the library uses, on host memory. Work on a stream is recorded
// where the stream is being captured. Else it is done at some time, drawn at random, between when
// it is asked for and when the host waits for it, so that memory that the host reads or changes
// too early is seen; the default stream does everything at once. As on a device, fresh memory holds
// anything (a pattern), and nothing may be allocated, copied synchronously or waited for during a
// capture. Every allocation ends at a page that faults, up to the 255 bytes that alignment
// leaves, which are looked at when it is freed. One thread at a time.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda_emulation/emulator.h"

// CUDA declares these and says no more about them.
struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};
struct CUstream_st {
  CUgraph_st* recording = nullptr;
  std::deque<std::function<void()>> waiting;
};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
  cudaStream_t stream = nullptr;  // where it was recorded last
  int waiting = 0;                // records that are not done yet
};

namespace fathom::emulation {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlignment = 256;  // what cudaMalloc promises
constexpr unsigned char kPattern = 0xEB;
constexpr std::size_t kDeviceBytes = std::size_t{1} << 36;
constexpr int kSharedBytes = 227 * 1024;

struct Allocation {
  unsigned char* mapped;
  std::size_t mapped_bytes;
  std::size_t bytes;  // asked for
  bool on_device;     // else page-locked memory of the host
};

std::map<const void*, Allocation> allocations;  // by where they start
std::size_t device_bytes_used = 0;
std::mutex registered_mutex;  // the host's memory may be registered in the background
std::map<const void*, std::size_t> registered;
std::set<cudaStream_t> streams;
int n_recording = 0;  // streams
cudaError_t last_error = cudaSuccess;

std::size_t RoundUp(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

cudaError_t Failed(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t Allocate(void** p, std::size_t bytes, bool on_device) {
  if (n_recording > 0) return Failed(cudaErrorStreamCaptureUnsupported);
  const std::size_t aligned = RoundUp(bytes, kAlignment), usable = RoundUp(aligned, kPage);
  if (on_device && aligned > kDeviceBytes - device_bytes_used) {
    return Failed(cudaErrorMemoryAllocation);
  }
  void* mapped =
      mmap(nullptr, usable + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return Failed(cudaErrorMemoryAllocation);
  auto* first = static_cast<unsigned char*>(mapped);
  mprotect(first + usable, kPage, PROT_NONE);
  std::memset(first, kPattern, usable);
  *p = first + (usable - aligned);
  allocations[*p] = {first, usable + kPage, bytes, on_device};
  if (on_device) device_bytes_used += aligned;
  return cudaSuccess;
}

void Finish(cudaStream_t stream) {
  if (stream == nullptr) return;
  while (!stream->waiting.empty()) {
    const std::function<void()> work = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    work();
  }
}
void FinishAll() {
  for (const cudaStream_t stream : streams) Finish(stream);
}

// Waits for the device, as CUDA does.
cudaError_t Free(void* p, bool on_device) {
  if (p == nullptr) return cudaSuccess;
  FinishAll();
  const auto found = allocations.find(p);
  if (found == allocations.end() || found->second.on_device != on_device)
    return Failed(cudaErrorInvalidValue);
  const Allocation& a = found->second;
  const auto* start = static_cast<const unsigned char*>(p);
  const unsigned char* end = a.mapped + a.mapped_bytes - kPage;
  const auto is_pattern = [](unsigned char byte) { return byte == kPattern; };
  if (!std::all_of(start + a.bytes, end, is_pattern) ||
      !std::all_of(static_cast<const unsigned char*>(a.mapped), start, is_pattern)) {
    Fail("something wrote beside an allocation of %zu bytes", a.bytes);
  }
  if (on_device) device_bytes_used -= RoundUp(a.bytes, kAlignment);
  munmap(a.mapped, a.mapped_bytes);
  allocations.erase(found);
  return cudaSuccess;
}

// `rows` runs of `width` bytes, each `pitch` bytes behind the one before.
struct Run {
  std::size_t pitch, width, rows;
  std::size_t bytes() const { return width == 0 || rows == 0 ? 0 : (rows - 1) * pitch + width; }
};

bool IsPageLocked(const void* p) {
  const auto holds = [p](const auto& map, const auto& bytes_of) {
    const auto found = map.upper_bound(p);
    if (found == map.begin()) return false;
    const auto& [start, entry] = *std::prev(found);
    return static_cast<const std::byte*>(p) <
           static_cast<const std::byte*>(start) + bytes_of(entry);
  };
  const std::lock_guard lock(registered_mutex);
  return holds(allocations, [](const Allocation& a) { return a.bytes; }) ||
         holds(registered, [](std::size_t bytes) { return bytes; });
}

void CopyRuns(void* to, const Run& to_run, const void* from, const Run& from_run) {
  for (std::size_t i = 0; i < to_run.rows; ++i) {
    std::memcpy(static_cast<std::byte*>(to) + i * to_run.pitch,
                static_cast<const std::byte*>(from) + i * from_run.pitch, to_run.width);
  }
}

// Fails where a side that `kind` says is the device's is not, or the other one is.
cudaError_t Copy(void* to, const Run& to_run, const void* from, const Run& from_run,
                 cudaMemcpyKind kind, cudaStream_t stream) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (to_run.bytes() > 0 && (IsDeviceMemory(to, to_run.bytes()) != to_device ||
                             IsDeviceMemory(from, from_run.bytes()) != from_device)) {
    return Failed(cudaErrorInvalidValue);
  }
  const bool records = stream != nullptr && stream->recording != nullptr;
  if (!records && to_device && !from_device && !IsPageLocked(from)) {
    // Pageable memory is read before the call returns.
    const auto* first = static_cast<const std::byte*>(from);
    const std::vector<std::byte> staged(first, first + from_run.bytes());
    Enqueue(stream, [=] { CopyRuns(to, to_run, staged.data(), from_run); });
    return cudaSuccess;
  }
  Enqueue(stream, [=] { CopyRuns(to, to_run, from, from_run); });
  if (!records && from_device && !to_device && !IsPageLocked(to)) Finish(stream);  // and written
  return cudaSuccess;
}

// What waits for the device is not allowed while a stream records.
cudaError_t CopyAtOnce(void* to, const Run& to_run, const void* from, const Run& from_run,
                       cudaMemcpyKind kind) {
  if (n_recording > 0) return Failed(cudaErrorStreamCaptureUnsupported);
  return Copy(to, to_run, from, from_run, kind, nullptr);
}

cudaError_t Fill(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (bytes > 0 && !IsDeviceMemory(to, bytes)) return Failed(cudaErrorInvalidValue);
  Enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

}  // namespace

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->recording != nullptr) {
    stream->recording->work.push_back(std::move(work));
  } else if (stream == nullptr) {
    work();
  } else {
    stream->waiting.push_back(std::move(work));
    if (DrawsOne()) Finish(stream);
  }
}

bool IsDeviceMemory(const void* p, std::size_t bytes) {
  auto found = allocations.upper_bound(p);
  if (found == allocations.begin()) return false;
  --found;
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(p) -
                                               static_cast<const std::byte*>(found->first));
  return found->second.on_device && offset <= found->second.bytes &&
         bytes <= found->second.bytes - offset;
}

void SetLastError(cudaError_t error) { last_error = error; }

}  // namespace fathom::emulation

using fathom::emulation::Enqueue;
using fathom::emulation::Failed;

extern "C" {

// A kernel that nvcc compiled registers itself by this when the program starts: it would be called
// instead of the emulated one.
// NOLINTNEXTLINE(bugprone-reserved-identifier): the name is nvcc's
void** __cudaRegisterFatBinary(void* /*binary*/) {
  fathom::emulation::Fail("kernels for a device were linked into this program");
}

cudaError_t cudaGetLastError() { return std::exchange(fathom::emulation::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return fathom::emulation::last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulated device";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaError";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : Failed(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrPageableMemoryAccess:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = fathom::emulation::kSharedBytes;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    default:
      fathom::emulation::Fail("device attribute %d is not emulated", static_cast<int>(attribute));
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::strcpy(properties->name, "emulated");
  properties->major = 9;
  properties->totalGlobalMem = fathom::emulation::kDeviceBytes;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *total = fathom::emulation::kDeviceBytes;
  *free = *total - fathom::emulation::device_bytes_used;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  return fathom::emulation::Allocate(p, bytes, true);
}
cudaError_t cudaFree(void* p) { return fathom::emulation::Free(p, true); }
cudaError_t cudaMallocHost(void** p, std::size_t bytes) {
  return fathom::emulation::Allocate(p, bytes, false);
}
cudaError_t cudaFreeHost(void* p) { return fathom::emulation::Free(p, false); }
cudaError_t cudaHostRegister(void* p, std::size_t bytes, unsigned /*flags*/) {
  const std::lock_guard lock(fathom::emulation::registered_mutex);
  fathom::emulation::registered[p] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  const std::lock_guard lock(fathom::emulation::registered_mutex);
  fathom::emulation::registered.erase(p);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned /*flags*/) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return fathom::emulation::CopyAtOnce(to, {0, bytes, 1}, from, {0, bytes, 1}, kind);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return fathom::emulation::Copy(to, {0, bytes, 1}, from, {0, bytes, 1}, kind, stream);
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return fathom::emulation::CopyAtOnce(to, {to_pitch, width, height}, from,
                                       {from_pitch, width, height}, kind);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  return fathom::emulation::Copy(to, {to_pitch, width, height}, from, {from_pitch, width, height},
                                 kind, stream);
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  if (fathom::emulation::n_recording > 0) return Failed(cudaErrorStreamCaptureUnsupported);
  return fathom::emulation::Fill(to, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return fathom::emulation::Fill(to, value, bytes, stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new CUstream_st;
  fathom::emulation::streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  fathom::emulation::Finish(stream);
  fathom::emulation::streams.erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const bool recording = stream != nullptr && stream->recording != nullptr;
  if (recording) return Failed(cudaErrorStreamCaptureUnsupported);
  fathom::emulation::Finish(stream);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (fathom::emulation::n_recording > 0) return Failed(cudaErrorStreamCaptureUnsupported);
  fathom::emulation::FinishAll();
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  fathom::emulation::FinishAll();
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  ++event->waiting;
  Enqueue(stream, [=] {
    event->time = std::chrono::steady_clock::now();
    event->waiting = std::max(event->waiting - 1, 0);  // launches of a graph were not counted
  });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned /*flags*/) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (fathom::emulation::streams.count(event->stream) > 0) {
    fathom::emulation::Finish(event->stream);
  }
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  if (start->waiting > 0 || end->waiting > 0) return Failed(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  if (stream == nullptr || stream->recording != nullptr) {
    return Failed(cudaErrorStreamCaptureUnsupported);
  }
  stream->recording = new CUgraph_st;
  ++fathom::emulation::n_recording;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (stream == nullptr || stream->recording == nullptr) return Failed(cudaErrorIllegalState);
  *graph = std::exchange(stream->recording, nullptr);
  --fathom::emulation::n_recording;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *exec = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : exec->work) Enqueue(stream, work);
  return cudaSuccess;
}

}  // extern "C"
