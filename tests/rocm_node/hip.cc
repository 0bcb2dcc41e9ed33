// A stand-in for libamdhip64.so: one node of AMD GPUs on the CPU, across processes. Built by
// node.py. Device memory is a memfd, which other processes map through an IPC handle; a stream is a
// thread; a graph is captured and replayed node by node, branches side by side. A kernel launch
// calls back into the test, which may run the machine code on the emulator of tests/amd.
//
// What it refuses, and with which error, is recorded in refusals.json with the source of each. It
// does not model time, caches, memory order between GPUs, or pageable memory: tensors of a CPU
// build of torch are host memory here, and copies take them as device memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hip_abi.h"

namespace {

using afd_comm::hip_abi::hipError_t;
using afd_comm::hip_abi::kNotReady;
using afd_comm::hip_abi::MemOp;

// hipError_t, from hip_runtime_api.h
constexpr hipError_t kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevicePointer = 17,
                     kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400,
                     kIllegalState = 401, kNotFound = 500, kAlreadyPeer = 704,
                     kNotRegistered = 713, kInvalidConfiguration = 9, kCaptureUnsupported = 900,
                     kCaptureInvalidated = 901, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
                     kCaptureIsolation = 905, kCapturedEvent = 907;
enum CaptureStatus { kNone = 0, kActive = 1, kInvalidated = 2 };
enum CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

// Work that is tried until it returns true: a wait returns false while it has to wait.
using Work = std::function<bool()>;

struct Node {
  Work work;
  std::vector<Node*> before;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
  Node* add(Work work, std::vector<Node*> before) {
    nodes.push_back(std::make_unique<Node>(Node{std::move(work), std::move(before)}));
    return nodes.back().get();
  }
};

// One run of a graph. A node runs once all nodes before it are done.
struct Run {
  std::shared_ptr<Graph> graph;
  std::map<const Node*, std::size_t> missing;  // how many of the nodes before it are not done
  std::map<const Node*, std::vector<const Node*>> behind;
  std::vector<const Node*> ready;  // tried each turn: waits may stay, all others leave at once

  explicit Run(std::shared_ptr<Graph> whole) : graph(std::move(whole)) {
    for (const auto& node : graph->nodes) {
      if (node->before.empty()) ready.push_back(node.get());
      missing[node.get()] = node->before.size();
      for (const Node* one : node->before) behind[one].push_back(node.get());
    }
  }
  bool turn() {
    for (std::size_t i = 0; i < ready.size();) {
      const Node* node = ready[i];
      if (!node->work()) {
        ++i;
        continue;
      }
      ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(i));
      for (const Node* next : behind[node])
        if (--missing[next] == 0) ready.push_back(next);
    }
    return ready.empty();
  }
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  int status = kNone;
  int mode = kGlobal;
  bool origin = false;
  std::shared_ptr<Graph> graph;
  std::vector<Node*> last;

  Stream() {
    std::thread([this] {
      while (true) {
        Work next;
        {
          std::unique_lock<std::mutex> lock(mutex);
          changed.wait(lock, [this] { return !queue.empty(); });
          next = queue.front();
        }
        while (!next()) usleep(20);
        const std::lock_guard<std::mutex> lock(mutex);
        queue.pop_front();
        changed.notify_all();
      }
    }).detach();
  }
  void add(Work work) {
    const std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
  }
  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex);
    return queue.empty();
  }
  hipError_t put(Work work) {
    if (status == kInvalidated) return kCaptureInvalidated;
    if (status == kActive)
      last = {graph->add(std::move(work), last)};
    else
      add(std::move(work));
    return 0;
  }
};

struct Event {
  bool timed = true;
  std::atomic<int> pending{0};
  std::atomic<int64_t> reached_ns{0};
  Stream* recorded_on = nullptr;
  Stream* captured_on = nullptr;
  std::shared_ptr<Graph> graph;
  std::vector<Node*> nodes;
};

struct Allocation {
  int fd;
  std::size_t bytes;
  uint64_t id;
};

std::mutex mutex;  // of everything below
std::map<char*, Allocation> allocations;
std::map<char*, std::size_t> imports, registered;
std::set<Stream*> streams, capturing;
std::set<std::pair<int, int>> peers;
thread_local int current = 0, capture_mode = kGlobal;
thread_local std::set<Stream*> captured_here;

template <typename Value>
bool holds(const std::map<char*, Value>& ranges, const void* pointer,
           const std::function<std::size_t(const Value&)>& size) {
  auto* address = const_cast<char*>(static_cast<const char*>(pointer));
  auto after = ranges.upper_bound(address);
  return after != ranges.begin() && address < (--after)->first + size(after->second);
}

bool is_known(const void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto same = [](const std::size_t& bytes) { return bytes; };
  return holds<Allocation>(allocations, pointer, [](const Allocation& a) { return a.bytes; }) ||
         holds<std::size_t>(imports, pointer, same) || holds<std::size_t>(registered, pointer, same);
}

int devices() {
  const char* visible = std::getenv("HIP_VISIBLE_DEVICES");
  if (visible == nullptr || *visible == '\0') {
    const char* count = std::getenv("STAND_IN_GPUS");
    return count == nullptr ? 2 : std::atoi(count);
  }
  int count = 1;
  for (; *visible != '\0'; ++visible) count += *visible == ',';
  return count;
}

// A call that a capture forbids, by this thread or, in mode global, by any: the captures are lost
// (hip_internal.hpp: CHECK_STREAM_CAPTURE_SUPPORTED).
hipError_t unless_capturing() {
  if (capture_mode == kRelaxed) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  std::set<Stream*> lost = captured_here;
  if (capture_mode == kGlobal || lost.empty())
    for (Stream* stream : capturing)
      if (stream->origin && stream->mode == kGlobal) lost.insert(stream);
  for (Stream* stream : lost) stream->status = kInvalidated;
  return lost.empty() ? 0 : kCaptureUnsupported;
}

Stream* of(void* stream) { return static_cast<Stream*>(stream); }

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// True once the operation is done; a wait returns false while its word has another value.
bool apply(const MemOp& op) {
  auto* word = reinterpret_cast<std::atomic<uint64_t>*>(op.address);
  auto* half = reinterpret_cast<std::atomic<uint32_t>*>(op.address);
  const auto narrow = static_cast<uint32_t>(op.value);
  switch (op.operation) {
    case 5: return word->store(op.value), true;
    case 2: return half->store(narrow), true;
    case 4:
      return op.flags == 1 ? word->load() == op.value
                           : static_cast<int64_t>(word->load() - op.value) >= 0;
    default:
      return op.flags == 1 ? half->load() == narrow
                           : static_cast<int32_t>(half->load() - narrow) >= 0;
  }
}

Work in_order(std::vector<MemOp> ops) {
  auto next = std::make_shared<std::size_t>(0);
  return [ops = std::move(ops), next] {
    while (*next < ops.size() && apply(ops[*next])) ++*next;
    if (*next < ops.size()) return false;
    *next = 0;  // a graph runs it again
    return true;
  };
}

hipError_t check_ops(unsigned count, const MemOp* ops) {
  if (ops == nullptr || count == 0 || count > 256) return kInvalidValue;
  for (unsigned i = 0; i < count; ++i) {
    const int kind = ops[i].operation;
    if (kind != 1 && kind != 2 && kind != 4 && kind != 5) return kInvalidValue;
    if ((kind == 1 || kind == 4) && ops[i].flags > 3) return kInvalidValue;
    if (!is_known(ops[i].address)) return kInvalidValue;  // HIP's kernel would fault instead
  }
  return 0;
}

// Adds a line to the file that STAND_IN_LOG names: "PID what".
void note(const char* what) {
  const char* path = std::getenv("STAND_IN_LOG");
  if (path == nullptr) return;
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  const std::string line = std::to_string(getpid()) + " " + what + "\n";
  if (fd < 0 || write(fd, line.data(), line.size()) < 0) std::perror(path);
  close(fd);
}

struct Handle {
  int pid;
  int fd;
  std::size_t bytes;
};

struct Function {
  const void* code;
  std::string name;
};
using Launch = void (*)(const void* code, const char* name, const unsigned* sizes, void** arguments);
std::atomic<Launch> launch{nullptr};

}  // namespace

extern "C" {
using namespace afd_comm::hip_abi;

hipError_t hipInit(unsigned) { return 0; }
const char* hipGetErrorString(hipError_t code) {
  return code == kOutOfMemory ? "out of memory" : "an error of the stand-in";
}
hipError_t hipGetDeviceCount(int* count) { return *count = devices(), 0; }
hipError_t hipGetDevice(int* device) { return *device = current, 0; }
hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= devices()) return kInvalidDevice;
  return current = device, 0;
}
// The only attribute that is asked for: the address of the HDP's flush register.
hipError_t hipDeviceGetAttribute(int* out, int attribute, int) {
  static uint32_t flush = 0;
  if (attribute != kHdpFlushRegister) return kInvalidValue;
  uint32_t* const at = &flush;
  return std::memcpy(out, &at, sizeof at), 0;
}
hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (peer < 0 || peer >= devices() || peer == current) return kInvalidDevice;
  const std::lock_guard<std::mutex> lock(mutex);
  return peers.insert({current, peer}).second ? 0 : kAlreadyPeer;
}
hipError_t hipThreadExchangeStreamCaptureMode(int* mode) {
  if (mode == nullptr || *mode < kGlobal || *mode > kRelaxed) return kInvalidValue;
  return std::swap(*mode, capture_mode), 0;
}

// -- memory

hipError_t hipMalloc(void** out, std::size_t bytes) {
  if (const hipError_t refused = unless_capturing()) return refused;
  if (out == nullptr) return kInvalidValue;
  if (bytes > (std::size_t{1} << 34)) return kOutOfMemory;
  const int fd = memfd_create("stand-in-hip", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *out = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const std::lock_guard<std::mutex> lock(mutex);
  static uint64_t last_id = 0;
  allocations[static_cast<char*>(*out)] = {fd, bytes, ++last_id};
  return 0;
}
hipError_t hipMemGetAddressRange(void** base, std::size_t* bytes, void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto after = allocations.upper_bound(static_cast<char*>(pointer));
  if (after == allocations.begin()) return kNotFound;
  --after;
  if (static_cast<char*>(pointer) >= after->first + after->second.bytes) return kNotFound;
  *base = after->first;
  *bytes = after->second.bytes;
  return 0;
}
hipError_t hipPointerGetAttribute(void* out, int attribute, void* memory) {
  if (attribute != kBufferId) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(static_cast<char*>(memory));
  if (found == allocations.end()) return kInvalidValue;
  return std::memcpy(out, &found->second.id, sizeof found->second.id), 0;
}
hipError_t hipFree(void* memory) {
  if (memory == nullptr) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(static_cast<char*>(memory));
  if (found == allocations.end()) return kInvalidValue;
  munmap(memory, found->second.bytes);
  close(found->second.fd);
  allocations.erase(found);
  return 0;
}
hipError_t hipHostRegister(void* host, std::size_t bytes, unsigned) {
  if (const hipError_t refused = unless_capturing()) return refused;
  if (host == nullptr || bytes == 0) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  registered[static_cast<char*>(host)] = bytes;
  return 0;
}
hipError_t hipHostUnregister(void* host) {
  const std::lock_guard<std::mutex> lock(mutex);
  return registered.erase(static_cast<char*>(host)) != 0 ? 0 : kNotRegistered;
}
hipError_t hipHostGetDevicePointer(void** out, void* host, unsigned) {
  return is_known(host) ? (*out = host, 0) : kInvalidValue;
}
hipError_t hipIpcGetMemHandle(IpcHandle* handle, void* memory) {
  if (handle == nullptr || memory == nullptr) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(static_cast<char*>(memory));
  if (found == allocations.end()) return kInvalidValue;
  const Handle out{getpid(), found->second.fd, found->second.bytes};
  std::memcpy(handle, &out, sizeof out);
  return 0;
}
hipError_t hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned flags) {
  if (out == nullptr || flags != kIpcLazyPeerAccess) return kInvalidValue;
  Handle in{};
  std::memcpy(&in, &handle, sizeof in);
  if (in.bytes == 0) return kInvalidValue;
  if (in.pid == getpid()) return kInvalidContext;
  const std::string path = "/proc/" + std::to_string(in.pid) + "/fd/" + std::to_string(in.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidDevicePointer;
  *out = mmap(nullptr, in.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (*out == MAP_FAILED) return kInvalidDevicePointer;
  const std::lock_guard<std::mutex> lock(mutex);
  imports[static_cast<char*>(*out)] = in.bytes;
  note("imported");
  return 0;
}
hipError_t hipIpcCloseMemHandle(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = imports.find(static_cast<char*>(memory));
  if (found == imports.end()) return kInvalidValue;
  munmap(memory, found->second);
  imports.erase(found);
  return 0;
}

// -- streams

hipError_t hipStreamCreateWithFlags(hipStream_t* out, unsigned) {
  auto* stream = new Stream;
  const std::lock_guard<std::mutex> lock(mutex);
  streams.insert(stream);
  return *out = reinterpret_cast<hipStream_t>(stream), 0;
}
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 1, *greatest = -1, 0;
}
hipError_t hipStreamCreateWithPriority(hipStream_t* out, unsigned, int) {
  auto* stream = new Stream;
  const std::lock_guard<std::mutex> lock(mutex);
  streams.insert(stream);
  return *out = reinterpret_cast<hipStream_t>(stream), 0;
}
hipError_t hipStreamDestroy(hipStream_t stream) { return of(stream)->drain(), 0; }
hipError_t hipStreamSynchronize(hipStream_t stream) {
  if (of(stream)->status != kNone)
    return of(stream)->status = kInvalidated, kCaptureUnsupported;
  if (const hipError_t refused = unless_capturing()) return refused;
  return of(stream)->drain(), 0;
}
hipError_t hipStreamQuery(hipStream_t stream) { return of(stream)->idle() ? 0 : kNotReady; }
hipError_t hipMemsetAsync(void* to, int value, std::size_t bytes, hipStream_t stream) {
  if (!is_known(to)) return kInvalidValue;
  return of(stream)->put([=] { return std::memset(to, value, bytes), true; });
}
hipError_t hipMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind,
                          hipStream_t stream) {
  if (bytes != 0 && (to == nullptr || from == nullptr)) return kInvalidValue;
  if (kind < 0 || (kind > 4 && kind != kCopyDevicesNoCu)) return kInvalidValue;
  return of(stream)->put([=] { return std::memcpy(to, from, bytes), true; });
}
hipError_t hipLaunchHostFunc(hipStream_t stream, void (*call)(void*), void* data) {
  if (call == nullptr) return kInvalidValue;
  return of(stream)->put([=] { return call(data), true; });
}
hipError_t hipStreamBatchMemOp(hipStream_t stream, unsigned count, MemOp* ops, unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (const hipError_t refused = check_ops(count, ops)) return refused;
  // As in HIP, a capture does not record it: it runs now.
  of(stream)->add(in_order({ops, ops + count}));
  return 0;
}

// -- events

hipError_t hipEventCreateWithFlags(hipEvent_t* out, unsigned flags) {
  auto* event = new Event;
  event->timed = (flags & kEventNoTiming) == 0;
  return *out = reinterpret_cast<hipEvent_t>(event), 0;
}
hipError_t hipEventDestroy(hipEvent_t) { return 0; }  // a stream or graph may still refer to it
hipError_t hipEventRecord(hipEvent_t handle, hipStream_t stream) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (event == nullptr) return kInvalidHandle;
  Stream* on = of(stream);
  if (on->status == kInvalidated) return kCaptureInvalidated;
  if (on->status == kActive) {  // an edge of the graph, not a time
    event->captured_on = on;
    event->graph = on->graph;
    event->nodes = on->last;
    return 0;
  }
  event->captured_on = nullptr;
  event->recorded_on = on;
  event->pending.fetch_add(1);
  on->add([event] {
    event->reached_ns = now_ns();
    event->pending.fetch_sub(1);
    return true;
  });
  return 0;
}
hipError_t hipEventQuery(hipEvent_t handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (event == nullptr) return kInvalidHandle;
  if (event->captured_on != nullptr && event->captured_on->status == kActive)
    return event->captured_on->status = kInvalidated, kCapturedEvent;
  return event->pending.load() == 0 ? 0 : kNotReady;
}
hipError_t hipEventElapsedTime(float* ms, hipEvent_t from, hipEvent_t to) {
  if (ms == nullptr) return kInvalidValue;
  auto *first = reinterpret_cast<Event*>(from), *then = reinterpret_cast<Event*>(to);
  if (first == nullptr || then == nullptr || !first->timed || !then->timed) return kInvalidHandle;
  if (first->pending.load() != 0 || then->pending.load() != 0) return kNotReady;
  *ms = static_cast<float>(then->reached_ns - first->reached_ns) / 1e6F;
  return 0;
}
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t handle, unsigned) {
  auto* event = reinterpret_cast<Event*>(handle);
  if (event == nullptr) return kInvalidHandle;
  Stream* on = of(stream);
  if (on->status == kInvalidated) return kCaptureInvalidated;
  const bool captured = event->captured_on != nullptr && event->captured_on->status == kActive;
  if (!captured) {
    const Stream* from = event->recorded_on;
    if (from != nullptr && from->status == kActive) return kCaptureIsolation;
    on->add([event] { return event->pending.load() == 0; });
    return 0;
  }
  if (on->status == kNone) {  // the stream joins the capture
    on->status = kActive;
    on->mode = event->captured_on->mode;
    on->graph = event->graph;
    on->last.clear();
    const std::lock_guard<std::mutex> lock(mutex);
    capturing.insert(on);
  }
  for (Node* node : event->nodes) {
    bool there = false;
    for (Node* one : on->last) there = there || one == node;
    if (!there) on->last.push_back(node);
  }
  return 0;
}

// -- graphs

hipError_t hipStreamBeginCapture(hipStream_t stream, int mode) {
  Stream* on = of(stream);
  if (on == nullptr) return kCaptureUnsupported;
  if (mode < kGlobal || mode > kRelaxed) return kInvalidValue;
  if (on->status == kActive) return kIllegalState;
  on->drain();
  on->graph = std::make_shared<Graph>();
  on->last.clear();
  on->mode = mode;
  on->origin = true;
  on->status = kActive;
  const std::lock_guard<std::mutex> lock(mutex);
  capturing.insert(on);
  if (mode != kRelaxed) captured_here.insert(on);
  return 0;
}
hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* out) {
  if (out == nullptr) return kInvalidValue;
  Stream* on = of(stream);
  if (on == nullptr || on->status == kNone) return kIllegalState;
  if (!on->origin) return kCaptureUnmatched;
  const auto graph = on->graph;
  const bool invalid = on->status == kInvalidated;
  std::set<const Node*> reached;
  std::vector<const Node*> todo(on->last.begin(), on->last.end());
  while (!todo.empty()) {
    const Node* node = todo.back();
    todo.pop_back();
    if (!reached.insert(node).second) continue;
    todo.insert(todo.end(), node->before.begin(), node->before.end());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto one = capturing.begin(); one != capturing.end();) {
      Stream* member = *one;
      if (member->graph != graph) {
        ++one;
        continue;
      }
      member->status = kNone;
      member->origin = false;
      member->graph.reset();
      member->last.clear();
      captured_here.erase(member);
      one = capturing.erase(one);
    }
  }
  *out = nullptr;
  if (invalid) return kCaptureInvalidated;
  if (reached.size() != graph->nodes.size()) return kCaptureUnjoined;
  *out = reinterpret_cast<hipGraph_t>(new std::shared_ptr<Graph>(graph));
  return 0;
}
hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, int* status, unsigned long long* id,
                                      hipGraph_t* graph, const hipGraphNode_t** before,
                                      std::size_t* count) {
  Stream* on = of(stream);
  *status = on->status;
  *id = reinterpret_cast<uintptr_t>(on->graph.get());
  *graph = reinterpret_cast<hipGraph_t>(on->graph.get());
  *before = reinterpret_cast<const hipGraphNode_t*>(on->last.data());
  *count = on->last.size();
  return 0;
}
hipError_t hipStreamUpdateCaptureDependencies(hipStream_t stream, hipGraphNode_t* nodes,
                                              std::size_t count, unsigned flags) {
  Stream* on = of(stream);
  if (on->status != kActive) return kIllegalState;
  if (flags > kSetDependencies) return kInvalidValue;
  if (flags == kSetDependencies) on->last.clear();
  for (std::size_t i = 0; i < count; ++i) on->last.push_back(reinterpret_cast<Node*>(nodes[i]));
  return 0;
}
hipError_t hipGraphAddBatchMemOpNode(hipGraphNode_t* out, hipGraph_t graph,
                                     const hipGraphNode_t* before, std::size_t count,
                                     const MemOpNode* params) {
  if (out == nullptr || graph == nullptr || params == nullptr || params->flags != 0)
    return kInvalidValue;
  if (const hipError_t refused = check_ops(params->count, params->ops)) return refused;
  std::vector<Node*> behind;
  for (std::size_t i = 0; i < count; ++i) behind.push_back(reinterpret_cast<Node*>(before[i]));
  Node* node = reinterpret_cast<Graph*>(graph)->add(
      in_order({params->ops, params->ops + params->count}), std::move(behind));
  return *out = reinterpret_cast<hipGraphNode_t>(node), 0;
}
hipError_t hipGraphInstantiate(void** out, hipGraph_t graph, void*, char*, std::size_t) {
  if (graph == nullptr) return kInvalidValue;
  return *out = new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph>*>(graph)), 0;
}
hipError_t hipGraphLaunch(void* executable, hipStream_t stream) {
  if (executable == nullptr) return kInvalidValue;
  const auto run = std::make_shared<Run>(*static_cast<std::shared_ptr<Graph>*>(executable));
  of(stream)->add([run] { return run->turn(); });
  return 0;
}
hipError_t hipGraphExecDestroy(void* executable) {
  return delete static_cast<std::shared_ptr<Graph>*>(executable), 0;
}

// -- kernels

void stand_in_set_launch(Launch callback) { launch = callback; }
hipError_t hipModuleLoadData(void** module, const void* code) {
  return *module = const_cast<void*>(code), 0;
}
hipError_t hipModuleGetFunction(void** out, void* module, const char* name) {
  return *out = new Function{module, name}, 0;
}
hipError_t hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, hipStream_t stream,
                                 void** arguments, void** extra) {
  const Launch call = launch;
  if (call == nullptr || extra != nullptr) return kInvalidValue;
  if (gx == 0 || gy == 0 || gz == 0) return kInvalidValue;
  if (bx == 0 || by == 0 || bz == 0) return kInvalidConfiguration;
  if (bx * by * bz > 1024 || shared > 64 * 1024) return kInvalidValue;
  const auto* what = static_cast<Function*>(function);
  // The caller keeps the arguments alive, as torch does for a captured launch by copying them.
  return of(stream)->put([=] {
    const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared};
    return call(what->code, what->name.c_str(), sizes, arguments), true;
  });
}
}
