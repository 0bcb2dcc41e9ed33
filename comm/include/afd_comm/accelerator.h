// Accelerator: what the transport needs from a device. One implementation per kind of device.
// Driver libraries are loaded on first use, so one build runs on every host.
//
// On CUDA nothing here launches a kernel: copies run on copy engines, stream operations on the
// device's front end. accelerator_hip.cc describes how HIP differs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "afd_comm/process.h"

namespace afd_comm {

enum class DeviceKind { Cpu, Cuda, Hip };

struct Device {
  DeviceKind kind = DeviceKind::Cpu;
  int index = 0;
  bool is_cpu() const { return kind == DeviceKind::Cpu; }
};

// "cpu", "cuda:N" or "hip:N". Throws CommError for anything else.
Device parse_device(const std::string& text);
std::string device_text(Device device);

// The framework's own stream (CUstream, hipStream_t), as an address.
using Stream = void*;
using Event = void*;

// What another process needs to map a device allocation.
using MemoryHandle = std::array<uint8_t, 64>;

// Device memory as a file descriptor, and where in it the memory begins.
struct DmaBuf {
  Fd fd;
  uint64_t offset = 0;
};

// One operation of a stream on a word that it can reach.
struct StreamOp {
  enum class Kind {
    Write,        // after all earlier work of the stream; visible to every device
    WaitEqual,    // the stream continues once the word is `value`
    WaitAtLeast,  // once the word minus `value` is not negative
  };
  Kind kind;
  void* address;  // from allocate(), pin() or import()
  uint64_t value;
  bool narrow = false;  // a word of 4 bytes instead of 8
};

// The allocation that holds an address.
struct MemoryRange {
  void* begin = nullptr;
  std::size_t bytes = 0;
  uint64_t id = 0;  // of the allocation: a later one at the same address has another
};

// How a NIC's writes into device memory become visible to the device's streams.
enum class RemoteWrites {
  Ordered,    // before a completion that the CPU has seen
  Flushed,    // after flush_remote_writes()
  Unordered,  // the device cannot tell: do not let a NIC write there
};

enum class CopyPath {
  Devices,  // both ends are device memory
  Any,      // the driver looks at the addresses
};

// Calls throw CommError, except those that release something. Thread safe. No call changes the
// calling thread's current device or disturbs a capture of another thread.
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  virtual Device device() const = 0;
  // DLDeviceType of allocate()'s memory (DLPack).
  virtual int dlpack_type() const = 0;

  // Returns zeroed device memory in a separate allocation, so that sharing it exposes nothing else.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;
  // Page-locks host memory. Returns its address for streams.
  virtual void* pin(void* host, std::size_t bytes) = 0;
  virtual void unpin(void* host) noexcept = 0;
  // Returns a handle for another process of this host.
  virtual MemoryHandle share(void* memory) = 0;
  // Maps memory that another process shared. Within the process that shared it, use reach().
  virtual void* import(const MemoryHandle& handle) = 0;
  virtual void drop(void* imported) noexcept = 0;
  // Lets this device address the memory that `peer` allocated in this process.
  virtual void reach(int peer) = 0;
  // Exports memory for the RDMA driver. It may begin anywhere in an allocation.
  virtual DmaBuf dmabuf(void* memory, std::size_t bytes) = 0;
  virtual MemoryRange range_of(const void* memory) = 0;
  virtual RemoteWrites remote_writes() = 0;
  // After it returns, streams see what NICs had written into device memory before. Any thread.
  virtual void flush_remote_writes() = 0;

  virtual Stream make_stream() = 0;
  // A stream of the highest priority, for copies that the work of other streams waits for. Streams
  // of one priority may share a hardware queue, where a copy would be stuck behind such a wait.
  virtual Stream make_copy_stream() = 0;
  // Whether work given to the stream is recorded into a graph.
  virtual bool capturing(Stream stream) = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;
  virtual void copy(Stream stream, void* to, const void* from, std::size_t bytes,
                    CopyPath path) = 0;
  // In order.
  virtual void run(Stream stream, const StreamOp* ops, std::size_t count) = 0;

  virtual Event make_event(bool timed) = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual bool done(Event event) = 0;
  virtual float elapsed_ms(Event from, Event to) = 0;
};

// Returns the accelerator of this device; there is one per device and process.
std::shared_ptr<Accelerator> open_accelerator(Device device);

// An allocation of a device.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<Accelerator> accelerator, std::size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory();
  Accelerator& accelerator() const { return *accelerator_; }
  void* get() const { return memory_; }

 private:
  std::shared_ptr<Accelerator> accelerator_;
  void* memory_;
};

// Host memory that a device can reach while this object lives.
class Pinned {
 public:
  Pinned(std::shared_ptr<Accelerator> accelerator, void* host, std::size_t bytes);
  Pinned(const Pinned&) = delete;
  ~Pinned();
  Accelerator& accelerator() const { return *accelerator_; }
  // Returns the address for streams of the host byte at `host`.
  void* at(const void* host) const { return device_ + (static_cast<const uint8_t*>(host) - host_); }

 private:
  std::shared_ptr<Accelerator> accelerator_;
  uint8_t* host_;
  uint8_t* device_;
};

}  // namespace afd_comm
