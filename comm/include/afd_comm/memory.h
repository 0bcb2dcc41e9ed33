// Region memory: its layout, its mapping, and the doorbell.
//
//   RegionHead | Claim[slots] | SlotControl[slots] | payload[slots], page aligned
//
// If the payload is on a device, a device allocation takes the place of the last part. Doorbells
// stay on the host, where peers of every kind and a Guard can reach them.
#pragma once

#include <atomic>
#include <cstdint>

#include "afd_comm/address.h"
#include "afd_comm/process.h"
#include "afd_comm/types.h"

namespace afd_comm {

constexpr uint64_t kRegionMagic = 0x4e4f494745524641;  // "AFREGION"
constexpr uint32_t kRegionVersion = 6;
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
                  std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must be lock free");

struct alignas(kLine) RegionHead {
  uint64_t magic;
  uint32_t version;
  uint32_t slots;
  uint64_t slot_bytes;
  uint32_t payloads;
  uint32_t on_device;
  ProcessIdentity owner;
  uint8_t token[16];
  uint64_t clock;  // clock_identity() of the owner
  alignas(kLine) std::atomic<uint32_t> closed;
  std::atomic<uint32_t> silent;   // 1: GPUs ring some doorbells, which wakes no thread
  std::atomic<uint64_t> serials;  // the last claim serial
  alignas(kLine) std::atomic<uint32_t> arrivals;  // futex word: changes with every doorbell
  alignas(kLine) std::atomic<uint32_t> sleepers;  // waiters that may be in the kernel
};

// The writer of a slot. serial 0: never claimed. owner 0: a connection, watched by its receiver
// thread.
struct alignas(kLine) Claim {
  std::atomic<uint64_t> serial;
  std::atomic<ProcessIdentity> owner;
};
constexpr uint64_t kSerialGone = uint64_t{1} << 63;  // set in Claim::serial once the writer is gone

// The header shares the doorbell's cache line, which saves moving one line between cores per
// message. The times are used only while tracing, and only if they do not fit into the header.
struct alignas(kLine) SlotControl {
  std::atomic<uint64_t> doorbell;
  Header header;
  alignas(kLine) Times times;
};
static_assert(sizeof(SlotControl) == 2 * kLine, "two cache lines per slot");

// Byte offsets from the start of the region. Pure.
struct Geometry {
  uint32_t slots = 0;
  uint64_t slot_bytes = 0;
  uint32_t payloads = 0;   // slots with the same remainder share a payload
  bool on_device = false;  // the payloads are in device memory
  uint64_t claims = 0;
  uint64_t controls = 0;
  uint64_t payload = 0;
  uint64_t stride = 0;  // from one payload to the next
  uint64_t total = 0;
  // Throws CommError for no slots, empty slots, or more than 2^46 bytes.
  // payloads 0: one per slot; else it must divide `slots`.
  static Geometry of(uint64_t slots, uint64_t slot_bytes, uint64_t payloads = 0,
                     bool on_device = false);
  uint64_t payload_offset(uint32_t slot) const { return slot % payloads * stride; }
  uint64_t payload_bytes() const { return payloads * stride; }
};

// A mapping of region memory. It must outlive all pointers into it.
class Memory {
 public:
  // Creates sealed memory that never appears under /dev/shm.
  static Memory create(const Geometry& geometry, const Token& token, const std::string& name);
  // Maps the memory that `address` names in another process, and verifies it.
  static Memory open(const ShmAddress& address);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&&) = delete;
  ~Memory();

  const Geometry& geometry() const { return geometry_; }
  const Fd& fd() const { return fd_; }
  // The mapping stays, but after this the address cannot be opened.
  void close_fd() { fd_.reset(); }

  RegionHead& head() const { return *reinterpret_cast<RegionHead*>(base_); }
  Claim& claim(uint32_t slot) const {
    return reinterpret_cast<Claim*>(base_ + geometry_.claims)[slot];
  }
  SlotControl& control(uint32_t slot) const {
    return reinterpret_cast<SlotControl*>(base_ + geometry_.controls)[slot];
  }
  uint8_t* payload(uint32_t slot) const { return payload_ + geometry_.payload_offset(slot); }
  // Sets the address of payloads in device memory.
  void place_payload(void* where) { payload_ = static_cast<uint8_t*>(where); }
  uint8_t* base() const { return base_; }

  // Publishes the slot's header and payload, and wakes the receiver if it sleeps.
  void ring(uint32_t slot, uint64_t flag) const;
  // Makes waiters check again, without a doorbell.
  void nudge() const;
  // Sleeps until arrivals differs from `seen`, `timeout_ns` have passed or a signal arrives (then
  // returns true).
  bool sleep(uint32_t seen, uint64_t timeout_ns) const;

 private:
  Memory(Fd fd, uint8_t* base, const Geometry& geometry);
  Fd fd_;
  uint8_t* base_;
  uint8_t* payload_;
  Geometry geometry_;
};

}  // namespace afd_comm
