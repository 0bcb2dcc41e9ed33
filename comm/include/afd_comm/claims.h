// Claims: which writer each slot belongs to, so that a waiter learns of its death.
#pragma once

#include <mutex>
#include <vector>

#include "afd_comm/memory.h"

namespace afd_comm {

// Takes `range` for `owner` (0: a connection) and returns the ticket that proves it.
// Older claims end. `lock_fd` must be an open file description of the memory used by no other
// thread. Throws CommError when the range lies outside of the region or the lock is not had by
// `deadline`.
uint64_t take_claim(const Memory& memory, SlotRange range, ProcessIdentity owner, int lock_fd,
                    uint64_t deadline);

// Marks the range's writer as gone, where the ticket is still the current one, and tells waiters.
void end_claim(const Memory& memory, SlotRange range, uint64_t ticket);

// Whether the slot still belongs to that ticket.
inline bool holds_claim(const Memory& memory, uint32_t slot, uint64_t ticket) {
  return memory.claim(slot).ticket.load(std::memory_order_acquire) == ticket;
}

// The receiver's view of its writers.
class WriterWatch {
 public:
  // Whether the slot's writer is known to be gone. One load.
  static bool gone(const Memory& memory, uint32_t slot) {
    return memory.claim(slot).ticket.load(std::memory_order_acquire) & kTicketGone;
  }
  // As gone(), but asks the kernel whether the writer still lives. Thread safe.
  bool look(const Memory& memory, uint32_t slot);

 private:
  bool alive(ProcessIdentity owner);
  std::mutex mutex_;
  std::vector<ProcessWatch> watches_;
};

}  // namespace afd_comm
