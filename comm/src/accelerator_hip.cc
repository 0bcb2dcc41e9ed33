// HIP through its runtime API. Compiled and run against a fake libamdhip64; never ran on AMD
// hardware.
//
// What it costs there, from ROCm's sources (rocm-systems 02cc1df, clr/hipamd/src/hip_stream_ops.cpp
// and clr/rocclr/device/rocm/rocvirtual.cpp):
//  - a stream write or wait is a kernel of one wave that ROCclr launches by itself; a wait spins in
//    it. GPU_STREAMOPS_CP_WAIT=1 makes it a barrier packet, but only for signal memory, which
//    cannot be shared. So on AMD this backend takes one wave per wait and per doorbell, not zero;
//  - neither hipStreamWaitValue64 nor hipStreamBatchMemOp is recorded by a stream capture, so under
//    one run() adds the graph node by itself;
//  - hipMemcpyDeviceToDeviceNoCU keeps a copy on SDMA.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "accelerator.h"
#include "afd_comm/types.h"
#include "hip_abi.h"

namespace afd_comm {
namespace {

namespace abi = hip_abi;

constexpr int kDlRocm = 10;
// An allocation of this size is not part of a larger block, so sharing it exposes nothing else.
constexpr std::size_t kBlock = std::size_t{2} << 20;
constexpr std::size_t kMaxBatch = 255;  // "must be less than 256"
constexpr const char* kRemedy = "install ROCm 6.4 or newer";

struct Api {
  const DriverLibrary library{"libamdhip64.so", kRemedy};
#define AFD_HIP(name) decltype(&abi::name) name = nullptr;
#include "hip_symbols.inc"
#undef AFD_HIP

  Api() {
#define AFD_HIP(symbol) library.find(symbol, #symbol);
#include "hip_symbols.inc"
#undef AFD_HIP
    check(hipInit(0), "start", "check rocminfo runs and a GPU is visible");
  }

  void check(abi::hipError_t result, const char* action, const char* remedy) const {
    if (result == 0) return;
    throw CommError(std::string("HIP cannot ") + action + ": " + hipGetErrorString(result) +
                    " (error " + std::to_string(result) + "); " + remedy);
  }
};

const Api& api() {
  static const Api& loaded = *new Api;
  return loaded;
}

// Makes the device current, and permits calls that HIP forbids during another thread's capture.
class Scope {
 public:
  explicit Scope(int device) {
    api().check(api().hipGetDevice(&before_), "ask for the current device",
                "an earlier error may have ended the process's context: restart it");
    api().check(api().hipSetDevice(device), "use the device", "look for an earlier error");
    api().hipThreadExchangeStreamCaptureMode(&mode_);
  }
  Scope(const Scope&) = delete;
  ~Scope() {
    api().hipThreadExchangeStreamCaptureMode(&mode_);
    api().hipSetDevice(before_);
  }

 private:
  int before_ = 0;
  int mode_ = abi::kCaptureRelaxed;
};

abi::MemOp mem_op(const StreamOp& op) {
  abi::MemOp out{};
  const bool write = op.kind == StreamOp::Kind::Write;
  if (op.narrow)
    out.operation = write ? abi::kWriteValue32 : abi::kWaitValue32;
  else
    out.operation = write ? abi::kWriteValue64 : abi::kWaitValue64;
  out.address = op.address;
  out.value = op.value;
  if (op.kind == StreamOp::Kind::WaitEqual) out.flags = abi::kWaitEqual;
  if (op.kind == StreamOp::Kind::WaitAtLeast) out.flags = abi::kWaitAtLeast;
  return out;
}

class Hip final : public Accelerator {
 public:
  explicit Hip(int index) : index_(index) {
    int count = 0;
    check(api().hipGetDeviceCount(&count), "count devices", "check rocminfo runs");
    if (index >= count)
      throw CommError("there is no hip:" + std::to_string(index) + ", this process sees " +
                      std::to_string(count) + " GPUs; look at HIP_VISIBLE_DEVICES");
  }

  Device device() const override { return {DeviceKind::Hip, index_}; }
  int dlpack_type() const override { return kDlRocm; }

  void* allocate(std::size_t bytes) override {
    const Scope scope(index_);
    const std::size_t whole = (bytes + kBlock - 1) / kBlock * kBlock;
    void* memory = nullptr;
    check(api().hipMalloc(&memory, whole), "allocate slots",
          "free memory of the GPU (vLLM: lower gpu_memory_utilization) or lower the slot capacity");
    const Stream stream = make_stream();
    abi::hipError_t cleared = api().hipMemsetAsync(memory, 0, whole, handle(stream));
    if (cleared == 0) cleared = api().hipStreamSynchronize(handle(stream));
    destroy_stream(stream);
    check(cleared, "clear slots", "look for the first error before this one");
    return memory;
  }

  void free(void* memory) noexcept override {
    quietly([&] { api().hipFree(memory); });
  }

  void* pin(void* host, std::size_t bytes) override {
    const Scope scope(index_);
    check(api().hipHostRegister(host, bytes, abi::kRegisterPortable | abi::kRegisterMapped),
          "page-lock host memory", "raise the limit of locked memory (ulimit -l)");
    void* memory = nullptr;
    const abi::hipError_t result = api().hipHostGetDevicePointer(&memory, host, 0);
    if (result != 0) api().hipHostUnregister(host);
    check(result, "map host memory", "check the GPU can map host memory");
    return memory;
  }

  void unpin(void* host) noexcept override {
    quietly([&] { api().hipHostUnregister(host); });
  }

  MemoryHandle share(void* memory) override {
    const Scope scope(index_);
    MemoryHandle out{};
    static_assert(sizeof out == sizeof(abi::IpcHandle), "handles are passed as they are");
    abi::IpcHandle raw{};
    check(api().hipIpcGetMemHandle(&raw, memory), "share device memory",
          "check /dev/kfd is open to both processes");
    std::memcpy(out.data(), &raw, sizeof raw);
    return out;
  }

  void* import(const MemoryHandle& from) override {
    const Scope scope(index_);
    abi::IpcHandle raw{};
    std::memcpy(&raw, from.data(), sizeof raw);
    void* memory = nullptr;
    check(
        api().hipIpcOpenMemHandle(&memory, raw, abi::kIpcLazyPeerAccess),
        "map the peer's device memory",
        "both processes must see both GPUs (HIP_VISIBLE_DEVICES, docker --ipc=host), and the GPUs "
        "must reach each other (rocm-smi --showtopoaccess)");
    return memory;
  }

  void drop(void* imported) noexcept override {
    quietly([&] { api().hipIpcCloseMemHandle(imported); });
  }

  void reach(int peer) override {
    if (peer == index_) return;
    const Scope scope(index_);
    const abi::hipError_t result = api().hipDeviceEnablePeerAccess(peer, 0);
    if (result != abi::kPeerAccessAlreadyEnabled)
      check(result, "reach the peer GPU", "see rocm-smi --showtopoaccess");
  }

  DmaBuf dmabuf(void* memory, std::size_t bytes) override {
    static const DriverLibrary hsa("libhsa-runtime64.so.1", kRemedy);
    decltype(&abi::hsa_amd_portable_export_dmabuf) portable_export = nullptr;
    hsa.find(portable_export, "hsa_amd_portable_export_dmabuf");
    int fd = -1;
    uint64_t offset = 0;
    if (portable_export(memory, bytes, &fd, &offset) != 0)
      throw CommError(
          "ROCm cannot export device memory as a dma-buf; use Linux 5.12 or newer with "
          "CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA, or load ib_peer_mem");
    return {Fd(fd), offset};
  }

  MemoryRange range_of(const void* memory) override {
    const Scope scope(index_);
    constexpr const char* remedy = "check that the memory is this device's and still allocated";
    MemoryRange range;
    check(api().hipMemGetAddressRange(&range.begin, &range.bytes, const_cast<void*>(memory)),
          "find an allocation", remedy);
    check(api().hipPointerGetAttribute(&range.id, abi::kBufferId, range.begin),
          "find an allocation", remedy);
    return range;
  }

  // ROCm has no attribute for the order. Writes over PCIe go through the HDP, whose flush register
  // RCCL (src/transport/net.cc, curr_hdp_reg) and rocSHMEM write for this purpose. Without such a
  // register there is nothing to flush.
  RemoteWrites remote_writes() override {
    return hdp_register() != nullptr ? RemoteWrites::Flushed : RemoteWrites::Ordered;
  }

  void flush_remote_writes() override {
    if (volatile uint32_t* const flush = hdp_register()) *flush = 1;
  }

  Stream make_copy_stream() override {
    const Scope scope(index_);
    int least = 0, greatest = 0;
    check(api().hipDeviceGetStreamPriorityRange(&least, &greatest), "ask for priorities", kRemedy);
    abi::hipStream_t stream = nullptr;
    check(api().hipStreamCreateWithPriority(&stream, abi::kStreamNonBlocking, greatest),
          "make a stream", "free memory of the GPU");
    return stream;
  }

  bool capturing(Stream stream) override {
    const Scope scope(index_);
    int status = 0;
    unsigned long long id = 0;
    abi::hipGraph_t graph = nullptr;
    const abi::hipGraphNode_t* before = nullptr;
    std::size_t before_count = 0;
    check(api().hipStreamGetCaptureInfo_v2(handle(stream), &status, &id, &graph, &before,
                                           &before_count),
          "look at the stream", "check that the stream belongs to this device");
    return status == abi::kCaptureActive;
  }

  Stream make_stream() override {
    const Scope scope(index_);
    abi::hipStream_t stream = nullptr;
    check(api().hipStreamCreateWithFlags(&stream, abi::kStreamNonBlocking), "make a stream",
          "free memory of the GPU");
    return stream;
  }

  void destroy_stream(Stream stream) noexcept override {
    quietly([&] { api().hipStreamDestroy(handle(stream)); });
  }

  void copy(Stream stream, void* to, const void* from, std::size_t bytes, CopyPath path) override {
    const Scope scope(index_);
    const int kind = path == CopyPath::Devices ? abi::kCopyDevicesNoCu : abi::kCopyDefault;
    check(api().hipMemcpyAsync(to, from, bytes, kind, handle(stream)), "copy",
          "check that the pointers are memory of this device that is still allocated");
  }

  void run(Stream stream, const StreamOp* ops, std::size_t count) override {
    const Scope scope(index_);
    abi::MemOp batch[kMaxBatch];
    while (count != 0) {
      const std::size_t now = std::min(count, kMaxBatch);
      for (std::size_t i = 0; i < now; ++i) batch[i] = mem_op(ops[i]);
      enqueue(handle(stream), batch, static_cast<unsigned>(now));
      ops += now;
      count -= now;
    }
  }

  Event make_event(bool timed) override {
    const Scope scope(index_);
    abi::hipEvent_t event = nullptr;
    check(api().hipEventCreateWithFlags(&event, timed ? 0 : abi::kEventNoTiming), "make an event",
          "free memory of the GPU");
    return event;
  }

  void destroy_event(Event event) noexcept override {
    quietly([&] { api().hipEventDestroy(static_cast<abi::hipEvent_t>(event)); });
  }

  void record(Event event, Stream stream) override {
    const Scope scope(index_);
    check(api().hipEventRecord(static_cast<abi::hipEvent_t>(event), handle(stream)),
          "record an event", "check that the stream belongs to this device");
  }

  bool done(Event event) override {
    const Scope scope(index_);
    const abi::hipError_t result = api().hipEventQuery(static_cast<abi::hipEvent_t>(event));
    if (result == abi::kNotReady) return false;
    check(result, "run what was enqueued", "look for the first error before this one");
    return true;
  }

  float elapsed_ms(Event from, Event to) override {
    const Scope scope(index_);
    float ms = 0;
    check(api().hipEventElapsedTime(&ms, static_cast<abi::hipEvent_t>(from),
                                    static_cast<abi::hipEvent_t>(to)),
          "read an event's time", "wait until both events are done");
    return ms;
  }

 private:
  static abi::hipStream_t handle(Stream stream) { return static_cast<abi::hipStream_t>(stream); }

  static void check(abi::hipError_t result, const char* action, const char* remedy) {
    api().check(result, action, remedy);
  }

  // Adds a graph node after the captured work so far; without a capture, runs at once.
  static void enqueue(abi::hipStream_t stream, abi::MemOp* batch, unsigned count) {
    constexpr const char* remedy = "check that the stream belongs to this device";
    int status = 0;
    unsigned long long id = 0;
    abi::hipGraph_t graph = nullptr;
    const abi::hipGraphNode_t* before = nullptr;
    std::size_t before_count = 0;
    check(api().hipStreamGetCaptureInfo_v2(stream, &status, &id, &graph, &before, &before_count),
          "look at the stream", remedy);
    if (status != abi::kCaptureActive) {
      check(api().hipStreamBatchMemOp(stream, count, batch, 0), "enqueue a stream operation",
            remedy);
      return;
    }
    const abi::MemOpNode params{nullptr, count, batch, 0};
    abi::hipGraphNode_t node = nullptr;
    check(api().hipGraphAddBatchMemOpNode(&node, graph, before, before_count, &params),
          "capture a stream operation", remedy);
    check(api().hipStreamUpdateCaptureDependencies(stream, &node, 1, abi::kSetDependencies),
          "capture a stream operation", remedy);
  }

  // Freeing fails only if the context is lost, and then nothing is left to free.
  template <typename Action>
  void quietly(Action action) noexcept {
    try {
      const Scope scope(index_);
      action();
    } catch (const CommError&) {
    }
  }

  uint32_t* hdp_register() {
    std::call_once(hdp_asked_, [this] {
      // The attribute is an address: it fills two ints.
      uint32_t* found = nullptr;
      if (api().hipDeviceGetAttribute(reinterpret_cast<int*>(&found), abi::kHdpFlushRegister,
                                      index_) == 0)
        hdp_register_ = found;
    });
    return hdp_register_;
  }

  int index_;
  std::once_flag hdp_asked_;
  uint32_t* hdp_register_ = nullptr;
};

}  // namespace

std::shared_ptr<Accelerator> open_hip(int index) { return std::make_shared<Hip>(index); }

}  // namespace afd_comm
