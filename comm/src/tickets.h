// Tickets: the messages that were enqueued on a link, each under a number that a stream can write.
//
// A ticket names its message and not the flag, because graphs of several sizes use the same flags
// on one slot.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "afd_comm/types.h"

namespace afd_comm {

using Ticket = uint32_t;
constexpr Ticket kNoTicket = 0;

// A message whose checks are done.
struct Prepared {
  Message message;
  const uint32_t* count = nullptr;  // see Link::enqueue
  bool staged = false;              // the parts have to be copied to the host first
  bool captured = false;            // may be sent many times
};

class Tickets {
 public:
  // Returns the message's ticket. Captured messages stay until their recording is released, others
  // until done(). Throws CommError if 2^20 messages are kept.
  Ticket add(const Prepared& prepared);
  // Null for a number that was never a ticket. Without a lock.
  const Prepared* find(Ticket ticket) const;
  // A message that was not captured has been sent. Without a lock; for one thread at a time.
  void done(Ticket ticket);
  // Whether any ticket may be written in the future.
  bool any() const { return kept_.load(std::memory_order_relaxed) != 0; }
  // Messages kept.
  uint32_t kept() const { return kept_.load(std::memory_order_relaxed); }

  // Starts a recording: what is captured from now on belongs to it.
  uint64_t record();
  void release(uint64_t recording);

 private:
  static constexpr uint32_t kBlock = 256;
  static constexpr uint32_t kBlocks = 4096;
  struct Entry {
    Prepared prepared;
    uint64_t recording = 0;
    Ticket next = kNoTicket;  // in a list of free entries
  };
  using Block = std::array<Entry, kBlock>;

  Entry& entry(Ticket ticket) const;
  void free(Ticket ticket);

  // Blocks never move, so find() needs no lock.
  std::array<std::unique_ptr<Block>, kBlocks> blocks_;
  std::atomic<uint32_t> made_{0};  // entries; those of tickets 1 to made_
  std::atomic<uint32_t> kept_{0};
  std::atomic<Ticket> done_{kNoTicket};  // list of entries that done() gave back
  std::mutex mutex_;                     // guards the rest
  Ticket free_ = kNoTicket;
  uint64_t recording_ = 0;
};

}  // namespace afd_comm
