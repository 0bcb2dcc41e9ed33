// A fake libcuda.so.1 (-DFAKE_CUDA) or libamdhip64.so (-DFAKE_HIP), for tests
// of the transport's host code. Device memory is a memfd, so that other
// processes can map it. A stream is a thread that runs its operations in order.
// Calls are logged to the file that FAKE_GPU_LOG names. The fake does not model
// speed, memory order, or which arguments a real driver accepts.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "cuda_abi.h"
#include "hip_abi.h"

namespace {

void log_call(const char *format, ...) {
  static FILE *const file = [] {
    const char *path = std::getenv("FAKE_GPU_LOG");
    return path == nullptr ? nullptr : std::fopen(path, "a");
  }();
  if (file == nullptr)
    return;
  va_list args;
  va_start(args, format);
  std::vfprintf(file, format, args);
  va_end(args);
  std::fputc('\n', file);
  std::fflush(file);
}

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool capturing = false;
  std::deque<std::function<void()>> graph; // what was captured

  Stream() {
    std::thread([this] {
      while (true) {
        std::function<void()> next;
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [this] { return !queue.empty(); });
          next = queue.front();
        }
        next();
        const std::lock_guard<std::mutex> lock(mutex);
        queue.pop_front();
        changed.notify_all();
      }
    }).detach();
  }
  void add(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex);
    (capturing ? graph : queue).push_back(std::move(work));
    changed.notify_all();
  }
  void replay() {
    const std::lock_guard<std::mutex> lock(mutex);
    queue.insert(queue.end(), graph.begin(), graph.end());
    changed.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
  }
};

struct Event {
  std::atomic<int> pending{0};
};

struct Allocation {
  int fd;
  std::size_t bytes;
  uint64_t id;
};
std::mutex allocations_mutex;
std::map<void *, Allocation> allocations;

int allocate(void **out, std::size_t bytes) {
  if (bytes > (std::size_t{1} << 34))
    return 2; // out of memory
  const int fd = memfd_create("fake-gpu", 0);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return 2;
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  static uint64_t last_id = 0;
  allocations[*out] = {fd, bytes, ++last_id};
  return 0;
}

int range_of(void **begin, std::size_t *bytes, void *memory) {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  auto found = allocations.upper_bound(memory);
  if (found == allocations.begin())
    return 1;
  --found;
  if (static_cast<char *>(memory) >=
      static_cast<char *>(found->first) + found->second.bytes)
    return 1;
  *begin = found->first;
  *bytes = found->second.bytes;
  return 0;
}

int buffer_id(uint64_t *out, void *memory) {
  void *begin = nullptr;
  std::size_t bytes = 0;
  if (range_of(&begin, &bytes, memory) != 0)
    return 1;
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  return *out = allocations.at(begin).id, 0;
}

int release(void *memory) {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  const auto found = allocations.find(memory);
  if (found == allocations.end())
    return 1;
  munmap(memory, found->second.bytes);
  close(found->second.fd);
  allocations.erase(found);
  return 0;
}

struct Handle {
  int pid;
  int fd;
  std::size_t bytes;
};

int share(void *handle, void *memory) {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  const auto found = allocations.find(memory);
  if (found == allocations.end())
    return 1;
  const Handle out{getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle, &out, sizeof out);
  return 0;
}

int import(void **out, const void *handle) {
  Handle in{};
  std::memcpy(&in, handle, sizeof in);
  if (in.pid == getpid())
    return 201; // as the real driver: no import within one process
  const std::string path =
      "/proc/" + std::to_string(in.pid) + "/fd/" + std::to_string(in.fd);
  const int fd = open(path.c_str(), O_RDWR);
  if (fd < 0)
    return 1;
  *out = mmap(nullptr, in.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return *out == MAP_FAILED ? 1 : 0;
}

template <typename Op>
int batch(Stream *stream, unsigned count, const Op *ops) {
  for (unsigned i = 0; i < count; ++i) {
    const Op op = ops[i];
    log_call("op %d value %llu flags %u", op.operation,
             (unsigned long long)op.value, op.flags);
    stream->add([op] {
      auto *word = reinterpret_cast<std::atomic<uint64_t> *>(op.address);
      auto *half = reinterpret_cast<std::atomic<uint32_t> *>(op.address);
      if (op.operation == 5)
        word->store(op.value);
      if (op.operation == 2)
        half->store(static_cast<uint32_t>(op.value));
      const auto open = [&] {
        if (op.operation == 4)
          return op.flags == 1
                     ? word->load() != op.value
                     : static_cast<int64_t>(word->load() - op.value) < 0;
        if (op.operation == 1)
          return op.flags == 1
                     ? half->load() != static_cast<uint32_t>(op.value)
                     : static_cast<int32_t>(
                           half->load() - static_cast<uint32_t>(op.value)) < 0;
        return false;
      };
      while (open())
        usleep(5);
    });
  }
  return 0;
}

// Fails while FAKE_GPU_REFUSE_PIN is set, as page locking does under a limit of
// locked memory.
int pin(unsigned flags) {
  log_call("pin flags %u", flags);
  return std::getenv("FAKE_GPU_REFUSE_PIN") == nullptr ? 0 : 2;
}

int copy(Stream *stream, void *to, const void *from, std::size_t bytes,
         int kind) {
  log_call("copy %zu kind %d", bytes, kind);
  stream->add([=] { std::memcpy(to, from, bytes); });
  return 0;
}

int record(Event *event, Stream *stream) {
  event->pending.fetch_add(1);
  stream->add([event] { event->pending.fetch_sub(1); });
  return 0;
}

constexpr int kDevices = 2;

} // namespace

#ifdef FAKE_CUDA
extern "C" {
using namespace afd_comm;
using namespace afd_comm::abi;
CUresult cuInit(unsigned) { return 0; }
CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = code == 2 ? "out of memory" : "some error";
  return 0;
}
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, 0; }
CUresult cuDeviceGetCount(int *count) { return *count = kDevices, 0; }
CUresult cuDeviceGetAttribute(int *value, int, CUdevice) {
  return *value = 1, 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1));
  return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *) { return 0; }
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) {
  return log_call("reach"), 0;
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  static thread_local int now = 0;
  std::swap(now, *mode);
  return 0;
}
CUresult cuMemAlloc_v2(CUdeviceptr *out, std::size_t bytes) {
  return allocate(reinterpret_cast<void **>(out), bytes);
}
CUresult cuMemFree_v2(CUdeviceptr memory) {
  return log_call("free"), release(reinterpret_cast<void *>(memory));
}
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, std::size_t, CUstream) {
  return 0;
}
CUresult cuMemHostRegister_v2(void *, std::size_t, unsigned flags) {
  return pin(flags);
}
CUresult cuMemHostUnregister(void *) { return log_call("unpin"), 0; }
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *host, unsigned) {
  return *out = reinterpret_cast<CUdeviceptr>(host), 0;
}
CUresult cuMemGetHandleForAddressRange(void *fd, CUdeviceptr memory,
                                       std::size_t, int, unsigned long long) {
  const std::lock_guard<std::mutex> lock(allocations_mutex);
  *static_cast<int *>(fd) =
      dup(allocations.at(reinterpret_cast<void *>(memory)).fd);
  return 0;
}
CUresult cuIpcGetMemHandle(IpcHandle *handle, CUdeviceptr memory) {
  return share(handle, reinterpret_cast<void *>(memory));
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, IpcHandle handle, unsigned) {
  log_call("import");
  return import(reinterpret_cast<void **>(out), &handle);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr) { return log_call("drop"), 0; }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *begin, std::size_t *bytes,
                                 CUdeviceptr memory) {
  return range_of(reinterpret_cast<void **>(begin), bytes,
                  reinterpret_cast<void *>(memory));
}
CUresult cuPointerGetAttribute(void *out, int, CUdeviceptr memory) {
  return buffer_id(static_cast<uint64_t *>(out),
                   reinterpret_cast<void *>(memory));
}
CUresult cuFlushGPUDirectRDMAWrites(int, int) { return log_call("flush"), 0; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -5, 0;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned, int priority) {
  log_call("stream priority %d", priority);
  return *stream = reinterpret_cast<CUstream>(new Stream), 0;
}
CUresult cuStreamIsCapturing(CUstream stream, int *status) {
  return *status = reinterpret_cast<Stream *>(stream)->capturing ? 1 : 0, 0;
}
// For tests: a stream that captures keeps its operations, and replays them as
// often as wanted.
void fake_set_capturing(CUstream stream, int on) {
  reinterpret_cast<Stream *>(stream)->capturing = on != 0;
}
void fake_replay(CUstream stream) {
  reinterpret_cast<Stream *>(stream)->replay();
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                       CUstream stream) {
  return copy(reinterpret_cast<Stream *>(stream), reinterpret_cast<void *>(to),
              reinterpret_cast<const void *>(from), bytes, 0);
}
CUresult cuStreamCreate(CUstream *stream, unsigned) {
  return *stream = reinterpret_cast<CUstream>(new Stream), 0;
}
CUresult cuStreamDestroy_v2(CUstream) { return 0; }
CUresult cuStreamSynchronize(CUstream stream) {
  return reinterpret_cast<Stream *>(stream)->drain(), 0;
}
CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, MemOp *ops,
                               unsigned) {
  return batch(reinterpret_cast<Stream *>(stream), count, ops);
}
CUresult cuEventCreate(CUevent *event, unsigned) {
  return *event = reinterpret_cast<CUevent>(new Event), 0;
}
CUresult cuEventDestroy_v2(CUevent) { return 0; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
  return record(reinterpret_cast<Event *>(event),
                reinterpret_cast<Stream *>(stream));
}
CUresult cuEventQuery(CUevent event) {
  return reinterpret_cast<Event *>(event)->pending.load() == 0 ? 0 : kNotReady;
}
CUresult cuEventElapsedTime(float *ms, CUevent, CUevent) { return *ms = 0, 0; }
}
#endif

#ifdef FAKE_HIP
extern "C" {
using namespace afd_comm::hip_abi;
hipError_t hipInit(unsigned) { return 0; }
const char *hipGetErrorString(hipError_t code) {
  return code == 2 ? "out of memory" : "some error";
}
hipError_t hipGetDeviceCount(int *count) { return *count = kDevices, 0; }
static thread_local int current = 0;
hipError_t hipGetDevice(int *device) { return *device = current, 0; }
hipError_t hipSetDevice(int device) { return current = device, 0; }
hipError_t hipDeviceEnablePeerAccess(int, unsigned) {
  return log_call("reach"), 0;
}
hipError_t hipThreadExchangeStreamCaptureMode(int *mode) {
  static thread_local int now = 0;
  std::swap(now, *mode);
  return 0;
}
hipError_t hipMalloc(void **out, std::size_t bytes) {
  return allocate(out, bytes);
}
hipError_t hipFree(void *memory) { return log_call("free"), release(memory); }
hipError_t hipMemsetAsync(void *, int, std::size_t, hipStream_t) { return 0; }
hipError_t hipHostRegister(void *, std::size_t, unsigned flags) {
  return pin(flags);
}
hipError_t hipHostUnregister(void *) { return log_call("unpin"), 0; }
hipError_t hipHostGetDevicePointer(void **out, void *host, unsigned) {
  return *out = host, 0;
}
hipError_t hipIpcGetMemHandle(IpcHandle *handle, void *memory) {
  return share(handle, memory);
}
hipError_t hipIpcOpenMemHandle(void **out, IpcHandle handle, unsigned) {
  return log_call("import"), import(out, &handle);
}
hipError_t hipIpcCloseMemHandle(void *) { return log_call("drop"), 0; }
hipError_t hipDeviceGetAttribute(int *out, int, int) {
  static uint32_t flush = 0;
  uint32_t *const at = &flush;
  return std::memcpy(out, &at, sizeof at), 0;
}
hipError_t hipMemGetAddressRange(void **begin, std::size_t *bytes,
                                 void *memory) {
  return range_of(begin, bytes, memory);
}
hipError_t hipPointerGetAttribute(void *out, int, void *memory) {
  return buffer_id(static_cast<uint64_t *>(out), memory);
}
hipError_t hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return *least = 0, *greatest = -1, 0;
}
hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned,
                                       int priority) {
  log_call("stream priority %d", priority);
  return *stream = reinterpret_cast<hipStream_t>(new Stream), 0;
}
hipError_t hipMemcpyAsync(void *to, const void *from, std::size_t bytes,
                          int kind, hipStream_t stream) {
  return copy(reinterpret_cast<Stream *>(stream), to, from, bytes, kind);
}
hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned) {
  return *stream = reinterpret_cast<hipStream_t>(new Stream), 0;
}
hipError_t hipStreamDestroy(hipStream_t) { return 0; }
hipError_t hipStreamSynchronize(hipStream_t stream) {
  return reinterpret_cast<Stream *>(stream)->drain(), 0;
}
hipError_t hipStreamBatchMemOp(hipStream_t stream, unsigned count, MemOp *ops,
                               unsigned) {
  return batch(reinterpret_cast<Stream *>(stream), count, ops);
}
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, int *status,
                                      unsigned long long *, hipGraph_t *,
                                      const hipGraphNode_t **,
                                      std::size_t *count) {
  *status = reinterpret_cast<Stream *>(stream)->capturing ? kCaptureActive : 0;
  *count = 0;
  return 0;
}
hipError_t hipStreamUpdateCaptureDependencies(hipStream_t, hipGraphNode_t *,
                                              std::size_t count,
                                              unsigned flags) {
  return log_call("capture dependencies %zu flags %u", count, flags), 0;
}
hipError_t hipGraphAddBatchMemOpNode(hipGraphNode_t *, hipGraph_t,
                                     const hipGraphNode_t *, std::size_t,
                                     const MemOpNode *params) {
  return log_call("capture node of %u ops", params->count), 0;
}
hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned) {
  return *event = reinterpret_cast<hipEvent_t>(new Event), 0;
}
hipError_t hipEventDestroy(hipEvent_t) { return 0; }
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return record(reinterpret_cast<Event *>(event),
                reinterpret_cast<Stream *>(stream));
}
hipError_t hipEventQuery(hipEvent_t event) {
  return reinterpret_cast<Event *>(event)->pending.load() == 0 ? 0 : kNotReady;
}
hipError_t hipEventElapsedTime(float *ms, hipEvent_t, hipEvent_t) {
  return *ms = 0, 0;
}
// For tests: sets whether this stream is being captured.
void fake_set_capturing(hipStream_t stream, int on) {
  reinterpret_cast<Stream *>(stream)->capturing = on != 0;
}
}
#endif
