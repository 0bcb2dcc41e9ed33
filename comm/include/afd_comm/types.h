// What every backend shares: status, header, message.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace afd_comm {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

// Outcome of a hot-path operation. Errors there are values, never exceptions.
enum class Status : int32_t {
  Ok = 0,
  Deadline = 1,   // not finished in time, or woken early by Region::wake
  PeerGone = 2,   // the other process ended, or closed its end
  BadHeader = 3,  // invalid slot, flag or frame
  Capacity = 4,   // a part does not fit into the slot
  Closed = 5,     // this end is closed, or a newer link claimed its slots
};

constexpr std::size_t kUserWords = 3;

// Describes a message to its receiver. Travels before the doorbell.
struct Header {
  std::array<uint64_t, kUserWords> user{};  // the application's; afd_comm never interprets them
  int64_t nbytes = 0;                       // sum of the parts
  uint32_t count = 0;  // items in the message; a scatter divides them among links
  uint32_t reserved = 0;
  uint32_t traced = 0;  // 0: no Times; else where they are, see packed_times.h
  uint32_t took = 0;    // packed Times
  int64_t posted = 0;   // packed Times
};
static_assert(sizeof(Header) == 56, "doorbell and header share a cache line");

// When a message passed each point, in ns of CLOCK_MONOTONIC of the host where it happened. See
// trace.h.
struct Times {
  int64_t posted = 0;        // post() was called
  int64_t sent = 0;          // its first byte was sent (shm: all of it was copied)
  int64_t arrived = 0;       // complete at the receiver, just before the doorbell
  int64_t consumed = 0;      // a wait saw the doorbell
  int64_t echo_posted = 0;   // posted of the message this one answers, 0: none
  int64_t echo_arrived = 0;  // arrived of the message this one answers
  uint64_t clock = 0;        // sender's clock_identity()
  int64_t reserved = 0;
};
static_assert(sizeof(Times) == 64, "times are one cache line");

// Two times of the message that this one answers. Both are 0 if that message was not traced.
struct Echo {
  int64_t posted = 0;
  int64_t arrived = 0;
};

// One contiguous piece of a message: `nbytes` from `data` go to `offset` in the slot.
struct Part {
  uint64_t offset;
  const void* data;
  uint64_t nbytes;
};

constexpr std::size_t kMaxParts = 8;

// One message as a link sends it. `flag` and `echo` differ from peer to peer; a Group fills them in
// for each link.
struct Message {
  uint32_t slot = 0;
  uint64_t flag = 0;
  Header header;
  Echo echo;
  Part parts[kMaxParts] = {};
  std::size_t part_count = 0;
  // So many of the last parts are sent whole where a count cuts the others: see Link::enqueue.
  std::size_t whole = 0;
};

// Slots that a link may write. count == 0: no claim; the link may write every slot, and the
// receiver does not notice its death.
struct SlotRange {
  uint32_t first = 0;
  uint32_t count = 0;
  bool contains(uint32_t slot) const { return slot - first < count; }
  bool overlaps(const SlotRange& other) const {
    return uint64_t{first} < uint64_t{other.first} + other.count &&
           uint64_t{other.first} < uint64_t{first} + count;
  }
};

// Flags are compared for equality. 0 is the doorbell of a slot that was never written, so no
// message may use it.
constexpr uint64_t make_flag(uint32_t generation, uint32_t seq) {
  return (uint64_t{generation} << 32) | seq;
}

// Called regularly during long waits; returning true ends the wait (e.g. Ctrl-C in Python).
using Interrupt = bool (*)();

// Set-up failed. The message names the cause and the remedy.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace afd_comm
