// Backend verbs, sender: what its proxy needs, and the memory that messages are sent from.
#include <utility>

#include "trace_clock.h"
#include "verbs_link.h"

namespace afd_comm {

DrivenLink::Start VerbsLink::start(const Message& m, const Available* available, Status& status) {
  status = check(m);
  if (status == Status::Ok) status = outcome();
  if (status != Status::Ok) return Start::Done;
  const uint64_t posted = traced() ? trace_now_ns() : 0;
  const uint32_t index = m.slot - first_;
  Outgoing& out = out_[index];
  if (out.open.load(std::memory_order_acquire) != 0 || window_is_full() != nullptr)
    return Start::Refused;
  status = prepare(index, m, posted);
  if (status != Status::Ok) return Start::Done;
  if (available == nullptr) {
    send_stripes(index);
    return Start::Done;
  }
  out.available = available;
  out.next = 0;
  return Start::Begun;
}

std::optional<Status> VerbsLink::go_on(uint32_t slot) {
  Outgoing& out = out_[slot - first_];
  for (; out.next < out.plan.count; ++out.next) {
    const Stripe& stripe = out.plan.stripes[out.next];
    if (outcome() != Status::Ok) return outcome();
    if (out.available->load(std::memory_order_relaxed) < stripe.end) return std::nullopt;
    if (alive_.load(std::memory_order_acquire) >> stripe.qp & 1)
      send_stripe(slot - first_, out.next, stripe.qp);
    else
      lose(out, out.next, stripe.qp);
  }
  return Status::Ok;
}

Status VerbsLink::give_up(uint32_t) {
  // A number that never comes would block all later messages at the receiver.
  end(Status::Closed, "a device did not copy a message in time");
  return Status::Deadline;
}

bool VerbsLink::sent(uint32_t slot) const {
  return out_[slot - first_].open.load(std::memory_order_acquire) == 0;
}

Status VerbsLink::health() const {
  return closed_.load(std::memory_order_acquire) ? Status::Closed : outcome();
}

std::shared_ptr<Poller> VerbsLink::poller() const {
  return {nics_[0], &nics_[0]->progress().poller()};
}

const VerbsSource* VerbsLink::source_of(const Part& part) const {
  for (const VerbsSource* source : *current_sources_.load(std::memory_order_acquire))
    if (source->holds(part.data, part.nbytes)) return source;
  return nullptr;
}

void VerbsLink::register_memory(void* address, uint64_t nbytes, Device device) {
  if (closed_.load(std::memory_order_acquire) || nbytes == 0) return;
  if (!device.is_cpu() && staged_) return;
  auto source = make_source(address, nbytes, device, 0);
  const std::lock_guard<std::mutex> lock(registering_);
  add_source(std::move(source));
}

bool VerbsLink::adopt(const void* data, uint64_t nbytes, Device device) {
  if (staged_) return false;
  const VerbsSource* const known = source_of(Part{0, data, nbytes});
  if (known != nullptr && known->id == 0) return true;
  const MemoryRange range = open_accelerator(device)->range_of(data);
  // Memory that was freed since, and allocated again, is other memory at the same address.
  if (known != nullptr && known->id == range.id) return true;
  const std::lock_guard<std::mutex> lock(registering_);
  add_source(make_source(range.begin, range.bytes, device, range.id));
  return true;
}

// Under registering_.
void VerbsLink::add_source(std::shared_ptr<const VerbsSource> source) {
  auto list = std::make_unique<SourceList>();
  for (const VerbsSource* const other : *current_sources_.load(std::memory_order_acquire))
    if (!other->overlaps(*source) || other->id == 0) list->push_back(other);
  list->push_back(source.get());
  current_sources_.store(list.get(), std::memory_order_release);
  sources_.push_back(std::move(source));
  source_lists_.push_back(std::move(list));
}

}  // namespace afd_comm
