// The part of ROCm's hip_runtime_api.h (6.4 and later) and hsa_ext_amd.h that accelerator_hip.cc
// calls. Never linked: `decltype` of these gives the types of what dlsym finds.
// comm/tests/gpu_abi_check.cc compares them with the real header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace afd_comm::hip_abi {

using hipError_t = int;
using hipStream_t = struct HipStreamOpaque*;
using hipEvent_t = struct HipEventOpaque*;
using hipGraph_t = struct HipGraphOpaque*;
using hipGraphNode_t = struct HipGraphNodeOpaque*;

// hipError_t
constexpr hipError_t kNotReady = 600;
constexpr hipError_t kPeerAccessAlreadyEnabled = 704;
constexpr unsigned kRegisterPortable = 1;
constexpr unsigned kRegisterMapped = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventNoTiming = 2;
constexpr int kHdpFlushRegister = 10005;  // hipDeviceAttribute_t
constexpr int kBufferId = 7;              // hipPointer_attribute
// hipMemcpyKind
constexpr int kCopyDefault = 4;
constexpr int kCopyDevicesNoCu = 1024;
// hipStreamCaptureMode, hipStreamCaptureStatus, hipStreamUpdateCaptureDependenciesFlags
constexpr int kCaptureRelaxed = 2;
constexpr int kCaptureActive = 1;
constexpr unsigned kSetDependencies = 1;
// hipStreamBatchMemOpType
constexpr int kWaitValue32 = 1;
constexpr int kWriteValue32 = 2;
constexpr int kWaitValue64 = 4;
constexpr int kWriteValue64 = 5;
constexpr unsigned kWaitAtLeast = 0;
constexpr unsigned kWaitEqual = 1;

struct IpcHandle {
  uint8_t reserved[64];
};

// hipStreamBatchMemOpParams, its members waitValue and writeValue
struct MemOp {
  int operation;
  void* address;
  uint64_t value;
  unsigned flags;
  void* alias;
  uint64_t pad;
};
static_assert(sizeof(MemOp) == 48, "hipStreamBatchMemOpParams is 6 words");

// hipBatchMemOpNodeParams
struct MemOpNode {
  void* context;
  unsigned count;
  MemOp* ops;
  unsigned flags;
};

hipError_t hipInit(unsigned);
const char* hipGetErrorString(hipError_t);
hipError_t hipGetDeviceCount(int*);
hipError_t hipGetDevice(int*);
hipError_t hipSetDevice(int);
hipError_t hipDeviceEnablePeerAccess(int, unsigned);
hipError_t hipThreadExchangeStreamCaptureMode(int*);
hipError_t hipMalloc(void**, std::size_t);
hipError_t hipFree(void*);
hipError_t hipMemsetAsync(void*, int, std::size_t, hipStream_t);
hipError_t hipHostRegister(void*, std::size_t, unsigned);
hipError_t hipHostUnregister(void*);
hipError_t hipHostGetDevicePointer(void**, void*, unsigned);
hipError_t hipIpcGetMemHandle(IpcHandle*, void*);
hipError_t hipIpcOpenMemHandle(void**, IpcHandle, unsigned);
hipError_t hipIpcCloseMemHandle(void*);
hipError_t hipDeviceGetAttribute(int*, int, int);
hipError_t hipMemGetAddressRange(void**, std::size_t*, void*);
hipError_t hipPointerGetAttribute(void*, int, void*);
hipError_t hipDeviceGetStreamPriorityRange(int*, int*);
hipError_t hipStreamCreateWithPriority(hipStream_t*, unsigned, int);
hipError_t hipMemcpyAsync(void*, const void*, std::size_t, int, hipStream_t);
hipError_t hipStreamCreateWithFlags(hipStream_t*, unsigned);
hipError_t hipStreamDestroy(hipStream_t);
hipError_t hipStreamSynchronize(hipStream_t);
hipError_t hipStreamBatchMemOp(hipStream_t, unsigned, MemOp*, unsigned);
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t, int*, unsigned long long*, hipGraph_t*,
                                      const hipGraphNode_t**, std::size_t*);
hipError_t hipStreamUpdateCaptureDependencies(hipStream_t, hipGraphNode_t*, std::size_t, unsigned);
hipError_t hipGraphAddBatchMemOpNode(hipGraphNode_t*, hipGraph_t, const hipGraphNode_t*,
                                     std::size_t, const MemOpNode*);
hipError_t hipEventCreateWithFlags(hipEvent_t*, unsigned);
hipError_t hipEventDestroy(hipEvent_t);
hipError_t hipEventRecord(hipEvent_t, hipStream_t);
hipError_t hipEventQuery(hipEvent_t);
hipError_t hipEventElapsedTime(float*, hipEvent_t, hipEvent_t);

// libhsa-runtime64.so.1; hsa_status_t 0 is success
int hsa_amd_portable_export_dmabuf(const void*, std::size_t, int*, uint64_t*);

}  // namespace afd_comm::hip_abi
