// Device memory for fake_ibverbs.cc: copies through the CUDA driver that the process has loaded.
// Without one, device memory does not occur.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "../src/cuda_abi.h"

namespace fake_gpu {

using namespace afd_comm;

// A piece of device memory that another process can map.
struct Shared {
  uint32_t usable = 0;
  uint32_t reserved = 0;
  abi::IpcHandle handle{};
  uint64_t offset = 0;  // of the memory in its allocation
};

struct Driver {
#define AFD_CUDA(name) decltype(&abi::name) name = nullptr;
#include "../src/cuda_symbols.inc"
#undef AFD_CUDA
  bool loaded = false;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return;
#define AFD_CUDA(name) name = reinterpret_cast<decltype(name)>(dlsym(library, #name));
#include "../src/cuda_symbols.inc"
#undef AFD_CUDA
    loaded = true;
  }
};

inline const Driver& driver() {
  static const Driver* const made = new Driver;
  return *made;
}

// Makes the context of a piece of device memory current.
class Scope {
 public:
  explicit Scope(uint64_t memory) {
    constexpr int kContext = 1;  // CU_POINTER_ATTRIBUTE_CONTEXT
    driver().cuPointerGetAttribute(&context, kContext, memory);
    driver().cuCtxPushCurrent_v2(context);
  }
  ~Scope() { driver().cuCtxPopCurrent_v2(&context); }
  CUcontext context = nullptr;
};

// `memory`: the device's end of the copy. Waits for it.
inline void copy(uint64_t memory, void* to, const void* from, uint64_t n) {
  const Scope scope(memory);
  thread_local std::map<CUcontext, CUstream> streams;
  CUstream& stream = streams[scope.context];
  int least = 0, greatest = 0;
  if (stream == nullptr) {
    driver().cuCtxGetStreamPriorityRange(&least, &greatest);
    driver().cuStreamCreateWithPriority(&stream, abi::kStreamNonBlocking, greatest);
  }
  driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), n,
                         stream);
  driver().cuStreamSynchronize(stream);
}

inline Shared share(uint64_t memory) {
  const Scope scope(memory);
  Shared out;
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  if (driver().cuMemGetAddressRange_v2(&base, &bytes, memory) != 0) return out;
  out.offset = memory - base;
  out.usable = driver().cuIpcGetMemHandle(&out.handle, base) == 0;
  return out;
}

// Maps memory of another process into the context that `near` belongs to. 0: it cannot be mapped.
inline uint64_t map(const Shared& shared, uint64_t near) {
  const Scope scope(near);
  CUdeviceptr base = 0;
  if (driver().cuIpcOpenMemHandle_v2(&base, shared.handle, abi::kIpcLazyPeerAccess) != 0) return 0;
  return base + shared.offset;
}

}  // namespace fake_gpu
