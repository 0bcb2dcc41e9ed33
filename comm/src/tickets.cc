#include "tickets.h"

#include <string>

namespace afd_comm {

Tickets::Entry& Tickets::entry(Ticket ticket) const {
  return (*blocks_[(ticket - 1) / kBlock])[(ticket - 1) % kBlock];
}

const Prepared* Tickets::find(Ticket ticket) const {
  if (ticket == kNoTicket || ticket > made_.load(std::memory_order_acquire)) return nullptr;
  return &entry(ticket).prepared;
}

Ticket Tickets::add(const Prepared& prepared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_ == kNoTicket) free_ = done_.exchange(kNoTicket, std::memory_order_acquire);
  Ticket ticket = free_;
  if (ticket != kNoTicket) {
    free_ = entry(ticket).next;
  } else {
    const uint32_t made = made_.load(std::memory_order_relaxed);
    if (made == kBlock * kBlocks)
      throw CommError("a link keeps " + std::to_string(made) +
                      " captured messages; release recordings of graphs that are gone "
                      "(Link.record), or open a new link");
    if (made % kBlock == 0) blocks_[made / kBlock] = std::make_unique<Block>();
    ticket = made + 1;
  }
  Entry& kept = entry(ticket);
  kept.prepared = prepared;
  kept.recording = prepared.captured ? recording_ : 0;
  kept_.fetch_add(1, std::memory_order_relaxed);
  if (ticket > made_.load(std::memory_order_relaxed))
    made_.store(ticket, std::memory_order_release);
  return ticket;
}

void Tickets::done(Ticket ticket) {
  Entry& sent = entry(ticket);
  // One thread pushes and add() takes the whole list, so no entry comes back in between.
  Ticket head = done_.load(std::memory_order_relaxed);
  do {
    sent.next = head;
  } while (!done_.compare_exchange_weak(head, ticket, std::memory_order_release,
                                        std::memory_order_relaxed));
  kept_.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t Tickets::record() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++recording_;
}

void Tickets::release(uint64_t recording) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t made = made_.load(std::memory_order_relaxed);
  for (Ticket ticket = 1; ticket <= made; ++ticket) {
    Entry& kept = entry(ticket);
    if (kept.recording != recording || !kept.prepared.captured) continue;
    kept.recording = 0;
    kept.next = free_;
    free_ = ticket;
    kept_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace afd_comm
