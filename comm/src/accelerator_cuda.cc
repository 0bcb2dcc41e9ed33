// CUDA through its driver API. cuda_abi.h repeats the declarations of NVIDIA's cuda.h (CUDA 12), so
// that the build needs no toolkit; tests/gpu checks them against the real header.
#include <algorithm>
#include <cstring>
#include <vector>

#include "accelerator.h"
#include "afd_comm/memory.h"
#include "afd_comm/types.h"
#include "cuda_abi.h"

namespace afd_comm {
namespace {

constexpr int kDlCuda = 2;
// cuMemAlloc takes small allocations from blocks of this size, and sharing exposes a whole block.
constexpr std::size_t kBlock = std::size_t{2} << 20;
constexpr std::size_t kMaxBatch = 256;  // operations of one cuStreamBatchMemOp
constexpr const char* kRemedy = "install NVIDIA's driver, version 525 (CUDA 12.0) or newer";

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

struct Api {
  const DriverLibrary library{"libcuda.so.1", kRemedy};
#define AFD_CUDA(name) decltype(&abi::name) name = nullptr;
#include "cuda_symbols.inc"
#undef AFD_CUDA

  Api() {
#define AFD_CUDA(symbol) library.find(symbol, #symbol);
#include "cuda_symbols.inc"
#undef AFD_CUDA
    check(cuInit(0), "start CUDA", "check nvidia-smi runs and a GPU is visible");
  }

  void check(CUresult result, const char* action, const char* remedy) const {
    if (result == 0) return;
    const char* text = nullptr;
    if (cuGetErrorString(result, &text) != 0 || text == nullptr) text = "unknown error";
    throw CommError(std::string("CUDA cannot ") + action + ": " + text + " (error " +
                    std::to_string(result) + "); " + remedy);
  }
};

const Api& api() {
  static const Api& loaded = *new Api;
  return loaded;
}

// Makes the context current, and permits calls that CUDA forbids during another thread's capture
// because they could wait for it. Our calls do not wait for it.
class Scope {
 public:
  explicit Scope(CUcontext context) {
    api().check(api().cuCtxPushCurrent_v2(context), "use the device",
                "an earlier error may have ended its context: restart the process");
    api().cuThreadExchangeStreamCaptureMode(&mode_);
  }
  Scope(const Scope&) = delete;
  ~Scope() {
    api().cuThreadExchangeStreamCaptureMode(&mode_);
    CUcontext popped = nullptr;
    api().cuCtxPopCurrent_v2(&popped);
  }

 private:
  int mode_ = abi::kCaptureRelaxed;
};

abi::MemOp mem_op(const StreamOp& op) {
  abi::MemOp out{};
  const bool write = op.kind == StreamOp::Kind::Write;
  if (op.narrow)
    out.operation = write ? abi::kWriteValue32 : abi::kWaitValue32;
  else
    out.operation = write ? abi::kWriteValue64 : abi::kWaitValue64;
  out.address = address(op.address);
  out.value = op.value;
  // By default a write is ordered after all earlier work, as seen by every device.
  if (op.kind == StreamOp::Kind::WaitEqual) out.flags = abi::kWaitEqual;
  if (op.kind == StreamOp::Kind::WaitAtLeast) out.flags = abi::kWaitAtLeast;
  return out;
}

class Cuda final : public Accelerator {
 public:
  explicit Cuda(int index) : index_(index) {
    int count = 0;
    api().check(api().cuDeviceGetCount(&count), "count devices", "check nvidia-smi runs");
    if (index >= count)
      throw CommError("there is no cuda:" + std::to_string(index) + ", this process sees " +
                      std::to_string(count) + " GPUs; look at CUDA_VISIBLE_DEVICES");
    api().check(api().cuDeviceGet(&device_, index), "open the device", "check nvidia-smi runs");
    int wide = 0;
    api().check(api().cuDeviceGetAttribute(&wide, abi::kWideMemOps, device_),
                "ask for 64-bit stream operations", kRemedy);
    if (wide == 0)
      throw CommError("cuda:" + std::to_string(index) +
                      " has no 64-bit stream memory operations; use a Volta or newer GPU on Linux");
    // The primary context, which PyTorch uses too. Kept until the process ends.
    api().check(api().cuDevicePrimaryCtxRetain(&context_, device_), "open the device",
                "free memory of the GPU, and check its compute mode allows several processes");
  }

  Device device() const override { return {DeviceKind::Cuda, index_}; }
  int dlpack_type() const override { return kDlCuda; }

  void* allocate(std::size_t bytes) override {
    const Scope scope(context_);
    const std::size_t whole = (bytes + kBlock - 1) / kBlock * kBlock;
    CUdeviceptr memory = 0;
    check(api().cuMemAlloc_v2(&memory, whole), "allocate slots",
          "free memory of the GPU (vLLM: lower gpu_memory_utilization) or lower the slot capacity");
    // Needs a separate stream: the default stream would wait for other streams.
    const auto stream = static_cast<CUstream>(make_stream());
    CUresult cleared = api().cuMemsetD8Async(memory, 0, whole, stream);
    if (cleared == 0) cleared = api().cuStreamSynchronize(stream);
    destroy_stream(stream);
    check(cleared, "clear slots", "look for the first error before this one");
    return pointer(memory);
  }

  void free(void* memory) noexcept override {
    quietly([&] { api().cuMemFree_v2(address(memory)); });
  }

  void* pin(void* host, std::size_t bytes) override {
    const Scope scope(context_);
    check(api().cuMemHostRegister_v2(host, bytes, abi::kRegisterPortable | abi::kRegisterMapped),
          "page-lock host memory", "raise the limit of locked memory (ulimit -l)");
    CUdeviceptr memory = 0;
    const CUresult result = api().cuMemHostGetDevicePointer_v2(&memory, host, 0);
    if (result != 0) api().cuMemHostUnregister(host);
    check(result, "map host memory", "check the GPU can map host memory");
    return pointer(memory);
  }

  void unpin(void* host) noexcept override {
    quietly([&] { api().cuMemHostUnregister(host); });
  }

  MemoryHandle share(void* memory) override {
    const Scope scope(context_);
    MemoryHandle handle{};
    static_assert(sizeof handle == sizeof(abi::IpcHandle), "handles are passed as they are");
    abi::IpcHandle raw{};
    check(api().cuIpcGetMemHandle(&raw, address(memory)), "share device memory",
          "CUDA IPC needs Linux and a GPU that is not under MIG's or a VM's restrictions");
    std::memcpy(handle.data(), &raw, sizeof raw);
    return handle;
  }

  void* import(const MemoryHandle& handle) override {
    const Scope scope(context_);
    abi::IpcHandle raw{};
    std::memcpy(&raw, handle.data(), sizeof raw);
    CUdeviceptr memory = 0;
    check(
        api().cuIpcOpenMemHandle_v2(&memory, raw, abi::kIpcLazyPeerAccess),
        "map the peer's device memory",
        "both processes must see both GPUs (CUDA_VISIBLE_DEVICES, docker --gpus, --ipc=host), and "
        "the GPUs must reach each other (nvidia-smi topo -p2p r)");
    return pointer(memory);
  }

  void drop(void* imported) noexcept override {
    quietly([&] { api().cuIpcCloseMemHandle(address(imported)); });
  }

  void reach(int peer) override {
    if (peer == index_) return;
    CUdevice device = 0;
    CUcontext context = nullptr;
    check(api().cuDeviceGet(&device, peer), "open the peer device", "check CUDA_VISIBLE_DEVICES");
    check(api().cuDevicePrimaryCtxRetain(&context, device), "open the peer device",
          "free memory of that GPU");
    const Scope scope(context_);
    const CUresult result = api().cuCtxEnablePeerAccess(context, 0);
    if (result != abi::kPeerAccessAlreadyEnabled)
      check(result, "reach the peer GPU", "see nvidia-smi topo -p2p r");
  }

  DmaBuf dmabuf(void* memory, std::size_t bytes) override {
    const Scope scope(context_);
    // The driver exports whole pages of the host.
    const CUdeviceptr first = address(memory) / kPage * kPage;
    const CUdeviceptr end = (address(memory) + bytes + kPage - 1) / kPage * kPage;
    int fd = -1;
    check(api().cuMemGetHandleForAddressRange(&fd, first, end - first, abi::kDmaBufFd, 0),
          "export device memory as a dma-buf",
          "use the open kernel modules of NVIDIA's driver and Linux 5.12 or newer, or load "
          "nvidia-peermem");
    return {Fd(fd), address(memory) - first};
  }

  MemoryRange range_of(const void* memory) override {
    const Scope scope(context_);
    constexpr const char* remedy = "check that the memory is this device's and still allocated";
    CUdeviceptr begin = 0;
    MemoryRange range;
    check(api().cuMemGetAddressRange_v2(&begin, &range.bytes, address(memory)),
          "find an allocation", remedy);
    check(api().cuPointerGetAttribute(&range.id, abi::kBufferId, begin), "find an allocation",
          remedy);
    range.begin = pointer(begin);
    return range;
  }

  RemoteWrites remote_writes() override {
    int ordering = 0, options = 0;
    check(api().cuDeviceGetAttribute(&ordering, abi::kWritesOrdering, device_),
          "ask how it orders RDMA writes", kRemedy);
    if (ordering >= abi::kOrderedForOwner) return RemoteWrites::Ordered;
    check(api().cuDeviceGetAttribute(&options, abi::kFlushOptions, device_),
          "ask how it flushes RDMA writes", kRemedy);
    return options & abi::kFlushByHost ? RemoteWrites::Flushed : RemoteWrites::Unordered;
  }

  void flush_remote_writes() override {
    const Scope scope(context_);
    check(api().cuFlushGPUDirectRDMAWrites(abi::kFlushContext, abi::kFlushToOwner),
          "flush RDMA writes", "look for the first error before this one");
  }

  Stream make_copy_stream() override {
    const Scope scope(context_);
    int least = 0, greatest = 0;
    check(api().cuCtxGetStreamPriorityRange(&least, &greatest), "ask for priorities", kRemedy);
    CUstream stream = nullptr;
    check(api().cuStreamCreateWithPriority(&stream, abi::kStreamNonBlocking, greatest),
          "make a stream", "free memory of the GPU");
    return stream;
  }

  bool capturing(Stream stream) override {
    const Scope scope(context_);
    int status = abi::kNotCapturing;
    check(api().cuStreamIsCapturing(static_cast<CUstream>(stream), &status), "look at the stream",
          "check that the stream belongs to this device");
    return status != abi::kNotCapturing;
  }

  Stream make_stream() override {
    const Scope scope(context_);
    CUstream stream = nullptr;
    check(api().cuStreamCreate(&stream, abi::kStreamNonBlocking), "make a stream",
          "free memory of the GPU");
    return stream;
  }

  void destroy_stream(Stream stream) noexcept override {
    quietly([&] { api().cuStreamDestroy_v2(static_cast<CUstream>(stream)); });
  }

  void copy(Stream stream, void* to, const void* from, std::size_t bytes, CopyPath) override {
    const Scope scope(context_);
    check(api().cuMemcpyAsync(address(to), address(from), bytes, static_cast<CUstream>(stream)),
          "copy", "check that the pointers are memory of this device that is still allocated");
  }

  void run(Stream stream, const StreamOp* ops, std::size_t count) override {
    const Scope scope(context_);
    abi::MemOp batch[kMaxBatch];
    while (count != 0) {
      const std::size_t now = std::min(count, kMaxBatch);
      for (std::size_t i = 0; i < now; ++i) batch[i] = mem_op(ops[i]);
      check(api().cuStreamBatchMemOp_v2(static_cast<CUstream>(stream), static_cast<unsigned>(now),
                                        batch, 0),
            "enqueue a stream operation", "check that the stream belongs to this device");
      ops += now;
      count -= now;
    }
  }

  Event make_event(bool timed) override {
    const Scope scope(context_);
    CUevent event = nullptr;
    check(api().cuEventCreate(&event, timed ? 0 : abi::kEventNoTiming), "make an event",
          "free memory of the GPU");
    return event;
  }

  void destroy_event(Event event) noexcept override {
    quietly([&] { api().cuEventDestroy_v2(static_cast<CUevent>(event)); });
  }

  void record(Event event, Stream stream) override {
    const Scope scope(context_);
    check(api().cuEventRecord(static_cast<CUevent>(event), static_cast<CUstream>(stream)),
          "record an event", "check that the stream belongs to this device");
  }

  bool done(Event event) override {
    const Scope scope(context_);
    const CUresult result = api().cuEventQuery(static_cast<CUevent>(event));
    if (result == abi::kNotReady) return false;
    check(result, "run what was enqueued", "look for the first error before this one");
    return true;
  }

  float elapsed_ms(Event from, Event to) override {
    const Scope scope(context_);
    float ms = 0;
    check(api().cuEventElapsedTime(&ms, static_cast<CUevent>(from), static_cast<CUevent>(to)),
          "read an event's time", "wait until both events are done");
    return ms;
  }

 private:
  static void check(CUresult result, const char* action, const char* remedy) {
    api().check(result, action, remedy);
  }

  // Freeing fails only if the context is lost, and then nothing is left to free.
  template <typename Action>
  void quietly(Action action) noexcept {
    try {
      const Scope scope(context_);
      action();
    } catch (const CommError&) {
    }
  }

  int index_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

}  // namespace

std::shared_ptr<Accelerator> open_cuda(int index) { return std::make_shared<Cuda>(index); }

}  // namespace afd_comm
