// SPDX-License-Identifier: MIT
// The emulated device of tests/cuda_emulation: that it computes what a device would, and that it
// finds the mistakes it is there for. Everything is compared exactly.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda_emulation/emulator.h"

namespace fathom {
namespace {

using emulation::Launch;

constexpr int kThreads = 128;
constexpr std::size_t kSharedBytes = kThreads * sizeof(int);

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t n) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, n * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(p);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

void RunBlocks(int blocks, const std::function<void()>& kernel) {
  Launch(nullptr, dim3(static_cast<unsigned>(blocks)), kThreads, kSharedBytes, nullptr, kernel);
}

int* Shared() { return reinterpret_cast<int*>(emulation::DynamicShared()); }

TEST(CudaEmulation, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> seen(3 * kThreads);
  RunBlocks(3, [&] { ++seen[blockIdx.x * blockDim.x + threadIdx.x]; });
  EXPECT_EQ(seen, std::vector<int>(3 * kThreads, 1));
}

TEST(CudaEmulation, Lanes) {
  RunBlocks(1, [] {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    EXPECT_EQ(__shfl_xor_sync(~0u, lane, 5), lane ^ 5);
    EXPECT_EQ(__shfl_up_sync(~0u, lane, 2), lane < 2 ? lane : lane - 2);
    EXPECT_EQ(__shfl_down_sync(~0u, lane, 2), lane > 29 ? lane : lane + 2);
    EXPECT_EQ(__shfl_sync(~0u, lane, 7), 7);
    EXPECT_EQ(__ballot_sync(~0u, lane % 2), 0xAAAAAAAAu);
    EXPECT_EQ(__reduce_add_sync(~0u, lane), 31 * 16);
    EXPECT_EQ(__match_any_sync(~0u, lane / 16), lane < 16 ? 0xFFFFu : 0xFFFF0000u);
  });
}

// Threads that have left are not waited for.
TEST(CudaEmulation, BarrierOfThoseThatAreLeft) {
  int count = 0;
  RunBlocks(1, [&] {
    if (threadIdx.x >= 100) return;
    const int votes = __syncthreads_count(threadIdx.x % 4 == 0);
    if (threadIdx.x == 0) count = votes;
  });
  EXPECT_EQ(count, 25);
}

int ReadNeighbours(bool wait) {
  int wrong = 0;
  RunBlocks(100, [&] {
    Shared()[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (wait) __syncthreads();
    const unsigned other = (threadIdx.x + kThreads / 2) % kThreads;
    if (Shared()[other] != static_cast<int>(other)) ++wrong;
  });
  return wrong;
}

TEST(CudaEmulation, AMissingBarrierIsSeen) {
  EXPECT_EQ(ReadNeighbours(true), 0);
  EXPECT_GT(ReadNeighbours(false), 0);
}

TEST(CudaEmulation, BytesOfAMatrixProduct) {
  // Row r of a is r + 1 in all columns, column c of b is c - 3: sums are 32 (r + 1) (c - 3) + 1.
  RunBlocks(1, [] {
    const int g = emulation::Lane() / 4, t = emulation::Lane() % 4;
    const std::uint32_t low = 0x01010101u * static_cast<std::uint32_t>(g + 1);
    const std::uint32_t high = 0x01010101u * static_cast<std::uint32_t>(g + 9);
    const std::uint32_t b = 0x01010101u * static_cast<std::uint8_t>(g - 3);
    std::array<int, 4> d{};
    emulation::MmaBytes(false, {&d[0], &d[1], &d[2], &d[3]}, {low, high, low, high}, {b, b},
                        {1, 1, 1, 1});
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, column = 2 * t + i % 2;
      EXPECT_EQ(d[static_cast<std::size_t>(i)], 32 * (row + 1) * (column - 3) + 1);
    }
  });
}

// Bytes are signed or not as the words are.
TEST(CudaEmulation, BytesOfADotProduct) {
  EXPECT_EQ(__dp4a(0x01FF0201, 0x01010103, 10), 10 + 1 - 1 + 2 + 3);
  EXPECT_EQ(__dp4a(0x01FF0201u, 0x01010103u, 10u), 10u + 1 + 255 + 2 + 3);
}

// Row r of matrix i holds 64 i + 8 r + column.
TEST(CudaEmulation, MatricesOfHalves) {
  RunBlocks(1, [] {
    const int lane = emulation::Lane();
    if (threadIdx.x < 32) {
      for (int j = 0; j < 4; ++j) {
        const unsigned first = static_cast<unsigned>(8 * lane + 2 * j);
        Shared()[4 * lane + j] = static_cast<int>(first | (first + 1) << 16);
      }
    }
    __syncthreads();
    const auto row = static_cast<unsigned>(16 * lane);
    std::array<std::uint32_t, 4> words{};
    const std::array<std::uint32_t*, 4> to = {&words[0], &words[1], &words[2], &words[3]};
    const auto group = static_cast<unsigned>(lane / 4), pair = static_cast<unsigned>(lane % 4);
    emulation::LoadMatrices(false, to, row);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned first = 64 * i + 8 * group + 2 * pair;
      EXPECT_EQ(words[i], first | (first + 1) << 16);
    }
    emulation::LoadMatrices(true, to, row);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned first = 64 * i + 16 * pair + group;
      EXPECT_EQ(words[i], first | (first + 8) << 16);
    }
  });
}

TEST(CudaEmulation, CopiesEndInZeros) {
  RunBlocks(1, [] {
    if (threadIdx.x != 0) return;
    alignas(16) const std::array<int, 4> from = {1, 2, 3, 4};
    emulation::CopyAsync(16, from.data(), 8);
    EXPECT_EQ(std::vector<int>(Shared() + 4, Shared() + 8), (std::vector<int>{1, 2, 0, 0}));
  });
}

// What cuBLASLt is asked for: d = transpose(a) b, in columns of 8, 3 of a and 5 of b.
class CudaEmulationBlas : public ::testing::Test {
 protected:
  void SetUp() override {
    cublasLtCreate(&handle_);
    cublasLtMatmulPreferenceCreate(&preference_);
    cublasLtMatmulDescInit(&product_, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtMatmulDescSetAttribute(&product_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                   sizeof(transposed));
    cublasLtMatrixLayoutInit(&a_, CUDA_R_16BF, 8, 3, 8);
    cublasLtMatrixLayoutInit(&b_, CUDA_R_16BF, 8, 5, 8);
    cublasLtMatrixLayoutInit(&d_, CUDA_R_32F, 3, 5, 3);
  }
  void TearDown() override {
    cublasLtMatmulPreferenceDestroy(preference_);
    cublasLtDestroy(handle_);
  }
  cublasStatus_t Ask() {
    int n_found = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle_, &product_, &a_, &b_, &d_, &d_, preference_, 1,
                                          &found_, &n_found);
  }
  cublasStatus_t Run(const std::uint16_t* a, const std::uint16_t* b, float* d) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle_, &product_, &one, a, &a_, b, &b_, &zero, d, &d_, d, &d_,
                          &found_.algo, workspace_.data(), 256, nullptr);
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  cublasLtMatmulDescOpaque_t product_{};
  cublasLtMatrixLayoutOpaque_t a_{}, b_{}, d_{};
  cublasLtMatmulHeuristicResult_t found_{};
  DeviceArray<std::byte> workspace_{256};
  DeviceArray<std::uint16_t> of_a_{24}, of_b_{40};
  DeviceArray<float> of_d_{15};
};

TEST_F(CudaEmulationBlas, Products) {
  // Column i of a is 1 and then zeros at place i, column j of b counts from 8 j.
  const auto bf16 = [](int x) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16);
  };
  for (int i = 0; i < 24; ++i) of_a_.data()[i] = bf16(i % 8 == i / 8 ? 2 : 0);
  for (int i = 0; i < 40; ++i) of_b_.data()[i] = bf16(i);
  ASSERT_EQ(Ask(), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(Run(of_a_.data(), of_b_.data(), of_d_.data()), CUBLAS_STATUS_SUCCESS);
  for (int j = 0; j < 5; ++j) {
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(of_d_.data()[3 * j + i], static_cast<float>(2 * (8 * j + i)));
    }
  }
}

TEST_F(CudaEmulationBlas, RefusesWhatItDoesNotKnow) {
  ASSERT_EQ(Ask(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(Run(nullptr, of_b_.data(), of_d_.data()), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatrixLayoutInit(&b_, CUDA_R_16BF, 8, 4, 8);  // d has five columns
  EXPECT_EQ(Ask(), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatrixLayoutInit(&d_, CUDA_R_32F, 3, 4, 3);  // and the algorithm was for five
  EXPECT_EQ(Run(of_a_.data(), of_b_.data(), of_d_.data()), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Ask(), CUBLAS_STATUS_SUCCESS);
  cublasLtMatrixLayoutInit(&b_, CUDA_R_16BF, 8, 4, 7);
  EXPECT_EQ(Ask(), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatrixLayoutInit(&b_, CUDA_R_16F, 8, 4, 8);
  EXPECT_EQ(Ask(), CUBLAS_STATUS_NOT_SUPPORTED);
  b_ = {};
  EXPECT_EQ(Ask(), CUBLAS_STATUS_INVALID_VALUE);
}

using CudaEmulationBlasDeathTest = CudaEmulationBlas;

TEST_F(CudaEmulationBlasDeathTest, OperandsThatAreNotTheDevices) {
  ASSERT_EQ(Ask(), CUBLAS_STATUS_SUCCESS);
  alignas(256) std::array<std::uint16_t, 40> host{};
  EXPECT_DEATH(Run(of_a_.data(), host.data(), of_d_.data()), "matrix b.*80 bytes");
  EXPECT_DEATH(Run(of_a_.data(), of_b_.data(), of_d_.data() + 1), "matrix c.*60 bytes");
}

TEST(CudaEmulation, BadLaunchesAreErrors) {
  const auto nothing = [] {};
  Launch(nullptr, dim3(0), kThreads, 0, nullptr, nothing);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  Launch(nullptr, dim3(1), 2048, 0, nullptr, nothing);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  // More shared memory than 48 KB has to be asked for.
  static const int kKernel = 0;
  Launch(&kKernel, dim3(1), kThreads, 49 * 1024, nullptr, nothing);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  const cudaFuncAttribute bytes = cudaFuncAttributeMaxDynamicSharedMemorySize;
  EXPECT_EQ(emulation::SetKernelAttribute(&kKernel, bytes, 49 * 1024), cudaSuccess);
  Launch(&kKernel, dim3(1), kThreads, 49 * 1024, nullptr, nothing);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaEmulation, CopiesAreOfTheirKind) {
  const DeviceArray<int> device(4);
  std::array<int, 4> host = {1, 2, 3, 4};
  EXPECT_EQ(cudaMemcpy(device.data(), host.data(), 16, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), device.data(), 16, cudaMemcpyDeviceToHost), cudaSuccess);
  for (const auto kind : {cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice}) {
    EXPECT_EQ(cudaMemcpy(device.data(), host.data(), 16, kind), cudaErrorInvalidValue);
  }
  EXPECT_EQ(cudaMemcpy(device.data() + 1, host.data(), 16, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);  // beyond the end
  EXPECT_EQ(cudaMemset(host.data(), 0, 16), cudaErrorInvalidValue);
  EXPECT_EQ(host[3], 4);
  cudaGetLastError();
}

TEST(CudaEmulation, MemoryIsLimited) {
  std::size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  {
    const DeviceArray<std::byte> array(1000);
    ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    EXPECT_EQ(before - after, 1024U);
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, after + 1), cudaErrorMemoryAllocation);
  }
  ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
  EXPECT_EQ(after, before);
  cudaGetLastError();
}

// A copy from page-locked memory may read what the host puts there before it waits; one from other
// memory does not.
TEST(CudaEmulation, CopiesOfAStreamTakeTheirTime) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  void* memory = nullptr;
  ASSERT_EQ(cudaMallocHost(&memory, sizeof(int)), cudaSuccess);
  const DeviceArray<int> device(1);
  int pageable = 0;
  for (int* host : {static_cast<int*>(memory), &pageable}) {
    int late = 0;
    for (int i = 0; i < 100; ++i) {
      *host = 1;
      ASSERT_EQ(cudaMemcpyAsync(device.data(), host, sizeof(int), cudaMemcpyHostToDevice, stream),
                cudaSuccess);
      *host = 2;
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      late += *device.data() == 2 ? 1 : 0;
    }
    EXPECT_EQ(late > 0, host == memory);
    EXPECT_LT(late, 100);
  }
  cudaFreeHost(memory);
  cudaStreamDestroy(stream);
}

TEST(CudaEmulation, ACaptureRecords) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  int runs = 0;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  Launch(nullptr, dim3(1), 32, 0, stream, [&] { runs += threadIdx.x == 0 ? 1 : 0; });
  void* p = nullptr;
  EXPECT_EQ(cudaMalloc(&p, 1), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  cudaGraphDestroy(graph);
  EXPECT_EQ(runs, 0);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(runs, 2);
  cudaGraphExecDestroy(exec);
  cudaStreamDestroy(stream);
  cudaGetLastError();
}

TEST(CudaEmulationDeathTest, LanesThatAreMissing) {
  const auto kernel = [] {
    if (threadIdx.x % 32 < 16) __syncwarp();
  };
  EXPECT_DEATH(RunBlocks(1, kernel), "deadlock in block");
}

// Of a kernel that may begin before what precedes it has ended.
TEST(CudaEmulationDeathTest, NotWaitedForWhatPrecedes) {
  const auto run = [](const std::function<void()>& kernel) {
    Launch(nullptr, dim3(1), kThreads, 0, nullptr, kernel, /*follows=*/true);
  };
  run([] { cudaGridDependencySynchronize(); });
  EXPECT_DEATH(run([] {
                 if (threadIdx.x > 0) cudaGridDependencySynchronize();
               }),
               "ends without having waited");
}

// What is before it may not be done then, unless the kernel before has waited first.
TEST(CudaEmulationDeathTest, WorksBesideAnother) {
  const auto run = [](bool waits_first) {
    const std::function<void()> before = [=] {
      if (!waits_first) cudaTriggerProgrammaticLaunchCompletion();
      cudaGridDependencySynchronize();
      if (waits_first) cudaTriggerProgrammaticLaunchCompletion();
    };
    const std::function<void()> beside = [] {
      cudaTriggerProgrammaticLaunchCompletion();
      __threadfence();
      cudaGridDependencySynchronize();
    };
    for (const auto& kernel : {before, beside, beside}) {
      Launch(nullptr, dim3(2), kThreads, 0, nullptr, kernel, /*follows=*/true);
    }
  };
  run(true);
  EXPECT_DEATH(run(false), "works beside one that has not waited first");
}

TEST(CudaEmulationDeathTest, BeyondTheEndOfMemory) {
  const DeviceArray<int> array(64);  // 256 bytes: the next page begins behind them
  EXPECT_DEATH(RunBlocks(1, [&] { array.data()[64] = 1; }), "");
  EXPECT_DEATH(RunBlocks(1, [&] { Shared()[kThreads] = 1; }), "");
  EXPECT_DEATH(
      {
        const DeviceArray<int> small(63);
        RunBlocks(1, [&] { small.data()[63] = 1; });
      },
      "beside an allocation of 252 bytes");
}

TEST(CudaEmulationDeathTest, MisalignedLoads) {
  const DeviceArray<float> array(64);
  const auto kernel = [&] { __ldg(reinterpret_cast<const float4*>(array.data() + 1)); };
  EXPECT_DEATH(RunBlocks(1, kernel), "misaligned");
}

}  // namespace
}  // namespace fathom
