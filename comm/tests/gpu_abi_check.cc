// Compares src/cuda_abi.h and src/hip_abi.h with the vendors' headers. Compiling it is the test:
//   g++ -std=c++17 -fsyntax-only -Icomm/src -I/usr/local/cuda/include -DCHECK_CUDA gpu_abi_check.cc
//   g++ -std=c++17 -fsyntax-only -Icomm/src -I/opt/rocm/include -DCHECK_HIP gpu_abi_check.cc
#include <cstddef>
#include <type_traits>

#if defined(CHECK_CUDA)
#include <cuda.h>
#define CUresult AfdCUresult
#define CUdevice AfdCUdevice
#define CUdeviceptr AfdCUdeviceptr
#define CUcontext AfdCUcontext
#define CUstream AfdCUstream
#define CUevent AfdCUevent
#undef cuMemGetHandleForAddressRange
#include "cuda_abi.h"
#undef CUresult
#undef CUdevice
#undef CUdeviceptr
#undef CUcontext
#undef CUstream
#undef CUevent

namespace abi = afd_comm::abi;
static_assert(abi::kNotReady == CUDA_ERROR_NOT_READY, "");
static_assert(abi::kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "");
static_assert(abi::kWideMemOps == CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "");
static_assert(abi::kFlushOptions == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, "");
static_assert(abi::kWritesOrdering == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, "");
static_assert(abi::kFlushByHost == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST, "");
static_assert(abi::kOrderedForOwner == CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, "");
static_assert(abi::kFlushContext == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, "");
static_assert(abi::kFlushToOwner == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, "");
static_assert(abi::kBufferId == CU_POINTER_ATTRIBUTE_BUFFER_ID, "");
static_assert(abi::kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE, "");
static_assert(abi::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE, "");
static_assert(abi::kRegisterMapped == CU_MEMHOSTREGISTER_DEVICEMAP, "");
static_assert(abi::kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, "");
static_assert(abi::kDmaBufFd == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, "");
static_assert(abi::kStreamNonBlocking == CU_STREAM_NON_BLOCKING, "");
static_assert(abi::kEventNoTiming == CU_EVENT_DISABLE_TIMING, "");
static_assert(abi::kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED, "");
static_assert(abi::kWaitValue32 == CU_STREAM_MEM_OP_WAIT_VALUE_32, "");
static_assert(abi::kWriteValue32 == CU_STREAM_MEM_OP_WRITE_VALUE_32, "");
static_assert(abi::kWaitValue64 == CU_STREAM_MEM_OP_WAIT_VALUE_64, "");
static_assert(abi::kWriteValue64 == CU_STREAM_MEM_OP_WRITE_VALUE_64, "");
static_assert(abi::kWaitAtLeast == CU_STREAM_WAIT_VALUE_GEQ, "");
static_assert(abi::kWaitEqual == CU_STREAM_WAIT_VALUE_EQ, "");
static_assert(sizeof(abi::IpcHandle) == sizeof(CUipcMemHandle), "");
static_assert(sizeof(afd_comm::AfdCUdeviceptr) == sizeof(CUdeviceptr), "");
using Theirs = CUstreamBatchMemOpParams;
static_assert(sizeof(abi::MemOp) == sizeof(Theirs), "");
static_assert(offsetof(abi::MemOp, address) == offsetof(Theirs, waitValue.address), "");
static_assert(offsetof(abi::MemOp, value) == offsetof(Theirs, waitValue.value64), "");
static_assert(offsetof(abi::MemOp, flags) == offsetof(Theirs, writeValue.flags), "");
#endif

#if defined(CHECK_HIP)
#define __HIP_PLATFORM_AMD__
// Hides the C++ overloads: decltype needs exactly one function per name.
#define __HIP_DISABLE_CPP_FUNCTIONS__
#include <hip/hip_runtime_api.h>

#include "hip_abi.h"

namespace ours = afd_comm::hip_abi;

// Their pointer types match any pointer of ours; their enumerations match our int.
template <typename A, typename B>
constexpr bool alike() {
  if (sizeof(A) != sizeof(B)) return false;
  return std::is_pointer<A>::value == std::is_pointer<B>::value &&
         std::is_class<A>::value == std::is_class<B>::value;
}
template <typename A, typename B>
struct Same : std::false_type {};
template <typename R, typename S, typename... A, typename... B>
struct Same<R(A...), S(B...)> {
  static constexpr bool count = sizeof...(A) == sizeof...(B);
  template <bool same_count, typename Unused = void>
  struct Each : std::false_type {};
  template <typename Unused>
  struct Each<true, Unused> {
    static constexpr bool value = alike<R, S>() && (alike<A, B>() && ...);
  };
  static constexpr bool value = Each<count>::value;
};
#define AFD_HIP(name) \
  static_assert(Same<decltype(ours::name), decltype(::name)>::value, #name " differs");
#include "hip_symbols.inc"
#undef AFD_HIP

static_assert(ours::kNotReady == hipErrorNotReady, "");
static_assert(ours::kPeerAccessAlreadyEnabled == hipErrorPeerAccessAlreadyEnabled, "");
static_assert(ours::kHdpFlushRegister == hipDeviceAttributeHdpMemFlushCntl, "");
static_assert(ours::kBufferId == HIP_POINTER_ATTRIBUTE_BUFFER_ID, "");
static_assert(ours::kRegisterPortable == hipHostRegisterPortable, "");
static_assert(ours::kRegisterMapped == hipHostRegisterMapped, "");
static_assert(ours::kIpcLazyPeerAccess == hipIpcMemLazyEnablePeerAccess, "");
static_assert(ours::kStreamNonBlocking == hipStreamNonBlocking, "");
static_assert(ours::kEventNoTiming == hipEventDisableTiming, "");
static_assert(ours::kCopyDefault == hipMemcpyDefault, "");
static_assert(ours::kCopyDevicesNoCu == hipMemcpyDeviceToDeviceNoCU, "");
static_assert(ours::kCaptureRelaxed == hipStreamCaptureModeRelaxed, "");
static_assert(ours::kCaptureActive == hipStreamCaptureStatusActive, "");
static_assert(ours::kSetDependencies == hipStreamSetCaptureDependencies, "");
static_assert(ours::kWaitValue32 == hipStreamMemOpWaitValue32, "");
static_assert(ours::kWriteValue32 == hipStreamMemOpWriteValue32, "");
static_assert(ours::kWaitValue64 == hipStreamMemOpWaitValue64, "");
static_assert(ours::kWriteValue64 == hipStreamMemOpWriteValue64, "");
static_assert(ours::kWaitAtLeast == hipStreamWaitValueGte, "");
static_assert(ours::kWaitEqual == hipStreamWaitValueEq, "");
static_assert(sizeof(ours::IpcHandle) == sizeof(hipIpcMemHandle_t), "");
using Theirs = hipStreamBatchMemOpParams;
static_assert(sizeof(ours::MemOp) == sizeof(Theirs), "");
static_assert(offsetof(ours::MemOp, address) == offsetof(Theirs, waitValue.address), "");
static_assert(offsetof(ours::MemOp, value) == offsetof(Theirs, waitValue.value64), "");
static_assert(offsetof(ours::MemOp, flags) == offsetof(Theirs, writeValue.flags), "");
static_assert(sizeof(ours::MemOpNode) == sizeof(hipBatchMemOpNodeParams), "");
static_assert(offsetof(ours::MemOpNode, ops) == offsetof(hipBatchMemOpNodeParams, paramArray), "");
#endif
