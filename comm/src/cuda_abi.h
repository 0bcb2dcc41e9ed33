// The part of NVIDIA's cuda.h (CUDA 12 and 13) that accelerator_cuda.cc calls. Never linked:
// `decltype` of these gives the types of what dlsym finds. comm/tests/gpu_abi_check.cc compares
// them with the real header where there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace afd_comm {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUcontextOpaque*;
using CUstream = struct CUstreamOpaque*;
using CUevent = struct CUeventOpaque*;

namespace abi {

// CUresult
constexpr CUresult kNotReady = 600;
constexpr CUresult kPeerAccessAlreadyEnabled = 704;
// CUdevice_attribute
constexpr int kWideMemOps = 122;
constexpr int kFlushOptions = 117;
constexpr int kWritesOrdering = 118;
constexpr int kFlushByHost = 1;        // CUflushGPUDirectRDMAWritesOptions
constexpr int kOrderedForOwner = 100;  // CUGPUDirectRDMAWritesOrdering
constexpr int kFlushContext = 0;       // CUflushGPUDirectRDMAWritesTarget
constexpr int kFlushToOwner = 100;     // CUflushGPUDirectRDMAWritesScope
constexpr int kBufferId = 7;           // CUpointer_attribute
constexpr int kNotCapturing = 0;       // CUstreamCaptureStatus
// CU_MEMHOSTREGISTER_*
constexpr unsigned kRegisterPortable = 1;
constexpr unsigned kRegisterMapped = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr int kDmaBufFd = 1;  // CUmemRangeHandleType
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventNoTiming = 2;
constexpr int kCaptureRelaxed = 2;  // CUstreamCaptureMode
// CUstreamBatchMemOpType
constexpr int kWaitValue32 = 1;
constexpr int kWriteValue32 = 2;
constexpr int kWaitValue64 = 4;
constexpr int kWriteValue64 = 5;
// CUstreamWaitValue_flags
constexpr unsigned kWaitAtLeast = 0;
constexpr unsigned kWaitEqual = 1;

struct IpcHandle {
  uint8_t reserved[64];
};

// CUstreamBatchMemOpParams, its members waitValue and writeValue
struct MemOp {
  int operation;
  CUdeviceptr address;
  uint64_t value;
  unsigned flags;
  CUdeviceptr alias;
  uint64_t pad;
};
static_assert(sizeof(MemOp) == 48, "CUstreamBatchMemOpParams is 6 words");

CUresult cuInit(unsigned);
CUresult cuGetErrorString(CUresult, const char**);
CUresult cuDeviceGet(CUdevice*, int);
CUresult cuDeviceGetCount(int*);
CUresult cuDeviceGetAttribute(int*, int, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxPushCurrent_v2(CUcontext);
CUresult cuCtxPopCurrent_v2(CUcontext*);
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned);
CUresult cuThreadExchangeStreamCaptureMode(int*);
CUresult cuMemAlloc_v2(CUdeviceptr*, std::size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, std::size_t, CUstream);
CUresult cuMemHostRegister_v2(void*, std::size_t, unsigned);
CUresult cuMemHostUnregister(void*);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr*, void*, unsigned);
CUresult cuMemGetHandleForAddressRange(void*, CUdeviceptr, std::size_t, int, unsigned long long);
CUresult cuIpcGetMemHandle(IpcHandle*, CUdeviceptr);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr*, IpcHandle, unsigned);
CUresult cuIpcCloseMemHandle(CUdeviceptr);
CUresult cuMemGetAddressRange_v2(CUdeviceptr*, std::size_t*, CUdeviceptr);
CUresult cuPointerGetAttribute(void*, int, CUdeviceptr);
CUresult cuFlushGPUDirectRDMAWrites(int, int);
CUresult cuCtxGetStreamPriorityRange(int*, int*);
CUresult cuStreamCreateWithPriority(CUstream*, unsigned, int);
CUresult cuStreamIsCapturing(CUstream, int*);
CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, std::size_t, CUstream);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamBatchMemOp_v2(CUstream, unsigned, MemOp*, unsigned);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuEventElapsedTime(float*, CUevent, CUevent);

}  // namespace abi
}  // namespace afd_comm
