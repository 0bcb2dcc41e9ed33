// Region: memory that the receiver owns and peers write into.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "afd_comm/accelerator.h"
#include "afd_comm/claims.h"
#include "afd_comm/memory.h"
#include "afd_comm/receiver.h"
#include "afd_comm/trace.h"
#include "afd_comm/verbs.h"

namespace afd_comm {

struct RegionOptions {
  std::string name;
  std::string tcp_host;   // empty: no TCP
  uint16_t tcp_port = 0;  // 0: the kernel chooses
  std::optional<VerbsOptions> verbs;
  uint64_t payloads = 0;  // see Geometry::of
  Device device;          // where the payloads are
};

// A doorbell that a thread waits for. `status` is Deadline until it is decided.
struct Awaited {
  uint32_t slot;
  uint64_t flag;
  Status status = Status::Deadline;
};

enum class WaitFor { All, Any };

class Region {
 public:
  // Throws CommError.
  Region(uint64_t slots, uint64_t slot_bytes, const RegionOptions& options);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& name() const { return name_; }
  uint32_t slots() const { return geometry().slots; }
  uint64_t slot_bytes() const { return geometry().slot_bytes; }
  // Bytes from one payload to the next.
  uint64_t slot_stride() const { return geometry().stride; }
  uint32_t payloads() const { return geometry().payloads; }
  const std::vector<std::string>& addresses() const { return addresses_; }
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  // Where the payloads are.
  Device device() const { return device_; }

  // Slots below must be < slots().
  uint8_t* payload(uint32_t slot) const { return memory_.payload(slot); }
  Header header(uint32_t slot) const { return memory_.control(slot).header; }
  bool ready(uint32_t slot, uint64_t flag) const {
    return memory_.control(slot).doorbell.load(std::memory_order_acquire) == flag;
  }
  // Returns the Times of the slot's message; zeros for a message without times.
  Times times(uint32_t slot) const;
  // From now on, waits that see a message in these slots record it in `trace` (null: stop). Throws
  // CommError for slots outside of the region.
  void trace(SlotRange slots, std::shared_ptr<PeerTrace> trace);
  // Whether the slot had a writer that is gone.
  bool gone(uint32_t slot) { return watch_.look(memory_, slot); }

  // All: returns once every entry is decided. Any: returns once one entry is Ok, or every writer is
  // gone. Also returns at `deadline`, on wake(), on close() (undecided entries become Closed) and
  // if `interrupt` (may be null) returns true. Returns true only in the last case.
  bool wait(Awaited* awaited, std::size_t count, WaitFor mode, uint64_t deadline,
            Interrupt interrupt);
  // Marks entries that have arrived. Returns true if the wait is over. Never blocks.
  bool poll(Awaited* awaited, std::size_t count, WaitFor mode);

  // For a region in host memory whose consumer is a GPU: from now on its streams may wait for
  // doorbells and copy from the slots. Regions on a device allow that from the start. Throws
  // CommError.
  void pin(Device device);
  // The device whose streams may wait here. Throws CommError if there is none.
  Accelerator& accelerator() const;
  // Makes the stream wait until every doorbell shows its flag; with `reset` it then sets them to 0.
  // Throws CommError.
  void enqueue_wait(Stream stream, const Awaited* awaited, std::size_t count, bool reset);
  // For a Guard, in place of a writer that will not ring; 0: before the same flag is awaited again.
  void set_doorbell(uint32_t slot, uint64_t value) {
    memory_.control(slot).doorbell.store(value, std::memory_order_release);
  }

  void wake();
  void set_spin_us(int64_t us) {
    spin_ns_.store(us < 0 ? 0 : us * 1000, std::memory_order_relaxed);
  }
  // Peers see the region as gone. The memory itself stays until destruction, so views never dangle.
  void close();

 private:
  const Geometry& geometry() const { return memory_.geometry(); }
  // Tracing state of a slot. `seen`: the last recorded flag, because several waits may see one
  // message. `consumed` is kept here and not in the slot: writing it there would cost the sender a
  // cache miss.
  struct SlotTrace {
    std::atomic<PeerTrace*> trace{nullptr};
    std::atomic<uint64_t> seen{0};
    std::atomic<int64_t> consumed{0};
  };
  IpcAddress place_on_device(const ShmAddress& shm);
  void note(uint32_t slot, uint64_t flag, PeerTrace& trace);
  void absorb(const Awaited* awaited, std::size_t count) const;
  // Returns the receiver that a wait for these doorbells may serve: one whose connections ring all
  // undecided ones. Null if there is none, or another waiter serves it.
  Receiver* begin_serving(const Awaited* awaited, std::size_t count) const;
  bool mark_gone(Awaited* awaited, std::size_t count, WaitFor mode, bool ask_kernel);

  std::string name_;
  Token token_;
  Memory memory_;
  Device device_;
  std::unique_ptr<DeviceMemory> device_payload_;  // null if the payload is in memory_
  std::unique_ptr<Pinned> pinned_;                // memory_, page-locked for accelerator()
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Receiver>> receivers_;
  WriterWatch watch_;
  std::unique_ptr<SlotTrace[]> slot_traces_;
  std::atomic<bool> traced_{false};  // whether any slot was ever traced
  std::mutex trace_mutex_;
  std::vector<std::shared_ptr<PeerTrace>> traces_;  // all traces ever assigned to a slot
  pid_t creator_;
  std::atomic<bool> closed_{false};
  std::atomic<uint32_t> wakes_{0};
  std::atomic<int64_t> spin_ns_;
  std::atomic<uint64_t> crowded_until_{
      0};  // other threads need this core: do not yield before this time
};

}  // namespace afd_comm
