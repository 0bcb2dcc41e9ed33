// ProxyLink on the poller's thread: from a ticket to a message that is sent.
#include "afd_comm/process.h"
#include "proxy_link.h"

namespace afd_comm {
namespace {

uint32_t read_count(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

}  // namespace

bool ProxyLink::armed() const { return tickets_->any() || open_.load() != 0; }

bool ProxyLink::poll() {
  bool any = current_.used != nullptr && step();
  const uint32_t count = used_count_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < count; ++i) any = take(*used_[i]) || any;
  return any;
}

bool ProxyLink::take(Used& used) {
  if (used.ticket == kNoTicket) {
    Cell& from = cell(used.slot);
    used.ticket = from.ticket.load(std::memory_order_acquire);
    if (used.ticket == kNoTicket) return false;
    // Before the message is sent: the next ticket may follow at once.
    open_.fetch_add(1);
    from.ticket.store(kNoTicket);
    used.deadline = 0;
  }
  const Prepared* const prepared = tickets_->find(used.ticket);
  if (prepared == nullptr || status_.load(std::memory_order_relaxed) != Status::Ok)
    return finish(used, Status::Ok);
  if (prepared->staged && (current_.used != nullptr || !link_->sent(used.slot)))
    return is_late(used);
  Message message = prepared->message;
  if (prepared->count != nullptr) {
    const uint32_t rows = read_count(prepared->count);
    if (rows > message.header.count) return finish(used, Status::BadHeader);
    keep_rows(message, rows);
  }
  if (prepared->staged) {
    current_ = {&used, message, false};
    used.deadline = deadline_after_us(options_.timeout_us);
    try {
      stage_->begin(current_.message, *used.buffer.load(std::memory_order_acquire));
    } catch (const CommError&) {
      return finish(used, Status::Closed);
    }
    return step() || true;
  }
  Status outcome = Status::Ok;
  switch (link_->start(message, nullptr, outcome)) {
    case DrivenLink::Start::Refused:
      return is_late(used);
    case DrivenLink::Start::Begun:
      current_ = {&used, message, true};
      used.deadline = deadline_after_us(options_.timeout_us);
      return true;
    case DrivenLink::Start::Done:
      break;
  }
  return finish(used, outcome);
}

// A ticket whose turn has not come.
bool ProxyLink::is_late(Used& used) {
  if (used.deadline == 0) used.deadline = deadline_after_us(options_.timeout_us);
  return now_ns() >= used.deadline && finish(used, Status::Deadline);
}

// Goes on with current_. Returns whether there was progress.
bool ProxyLink::step() {
  Used& used = *current_.used;
  const Prepared& prepared = *tickets_->find(used.ticket);
  bool progress = false;
  const Available* available = nullptr;
  if (prepared.staged) {
    available = stage_->available();
    const uint64_t before = available->load(std::memory_order_relaxed);
    try {
      stage_->advance();
    } catch (const CommError&) {
      if (current_.begun) link_->give_up(used.slot);
      return finish(used, Status::Closed);
    }
    progress = available->load(std::memory_order_relaxed) != before;
  }
  Status outcome = Status::Ok;
  if (!current_.begun) {
    const auto start = link_->start(current_.message, available, outcome);
    if (start == DrivenLink::Start::Done) return finish(used, outcome);
    current_.begun = start == DrivenLink::Start::Begun;
    progress = progress || current_.begun;
  } else if (const std::optional<Status> status = link_->go_on(used.slot)) {
    return finish(used, *status);
  }
  if (progress || now_ns() < used.deadline) return progress;
  return finish(used, current_.begun ? link_->give_up(used.slot) : Status::Deadline);
}

// The ticket is done with. Returns true.
bool ProxyLink::finish(Used& used, Status outcome) {
  if (outcome != Status::Ok) {
    Status none = Status::Ok;
    status_.compare_exchange_strong(none, outcome, std::memory_order_acq_rel);
  }
  if (current_.used == &used) current_.used = nullptr;
  const Prepared* const prepared = tickets_->find(used.ticket);
  if (prepared != nullptr && !prepared->captured) tickets_->done(used.ticket);
  used.ticket = kNoTicket;
  open_.fetch_sub(1);
  return true;
}

}  // namespace afd_comm
