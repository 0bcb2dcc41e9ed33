#include "afd_comm/group.h"

#include <algorithm>

#include "afd_comm/process.h"
#include "socket.h"

namespace afd_comm {
Group::Group(std::vector<Link*> links, int64_t timeout_us, Interrupt interrupt)
    : links_(std::move(links)),
      timeout_us_(timeout_us),
      interrupt_(interrupt),
      statuses_(links_.size(), Status::Ok),
      waiting_(links_.size()),
      waiting_links_(links_.size()) {
  for (std::size_t i = 0; i < links_.size(); ++i) {
    may_block_ = may_block_ || links_[i]->may_block();
    // The second post would wait for the unfinished first one.
    if (std::count(links_.begin(), links_.end(), links_[i]) > 1)
      throw CommError("a group holds the same link twice; open one link per peer");
  }
}

bool Group::post(Message message, const PerLink& per) {
  const Message whole = message;
  uint64_t items_before = 0;
  std::size_t pending = 0;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    message.flag = per.flags[i];
    if (per.echoes != nullptr) message.echo = per.echoes[i];
    if (per.counts != nullptr) {
      const uint64_t items = per.counts[i];
      uint64_t total = 0;
      for (std::size_t k = 0; k < whole.part_count; ++k) {
        const uint64_t item = whole.parts[k].nbytes;
        message.parts[k].data =
            static_cast<const uint8_t*>(whole.parts[k].data) + items_before * item;
        // An overflow must exceed the slot, so that the link refuses the message.
        if (__builtin_mul_overflow(items, item, &message.parts[k].nbytes))
          message.parts[k].nbytes = UINT64_MAX;
        total += message.parts[k].nbytes;
      }
      message.header.count = per.counts[i];
      message.header.nbytes = static_cast<int64_t>(total);
      items_before += items;
    }
    if (message.flag == 0) {
      statuses_[i] = Status::Ok;
      continue;
    }
    const std::optional<Status> status = links_[i]->begin(message);
    statuses_[i] = status.value_or(Status::Deadline);
    if (status) continue;
    waiting_[pending] = pollfd{links_[i]->pollable(), POLLOUT, 0};
    waiting_links_[pending++] = i;
  }
  if (pending != 0) finish(pending);
  return std::all_of(statuses_.begin(), statuses_.end(), [](Status s) { return s == Status::Ok; });
}

void Group::finish(std::size_t pending) {
  const uint64_t deadline = deadline_after_us(timeout_us_);
  bool stop = false;
  while (pending != 0 && !stop) {
    const uint64_t now = now_ns();
    const uint64_t left = deadline > now ? deadline - now : 0;
    const int ready = ::poll(waiting_.data(), pending,
                             static_cast<int>((std::min(left, kPollSliceNs) + 999999) / 1000000));
    std::size_t still = 0;
    for (std::size_t k = 0; k < pending; ++k) {
      const std::size_t i = waiting_links_[k];
      if (ready > 0 && waiting_[k].revents != 0) {
        const std::optional<Status> status = links_[i]->advance();
        if (status) {
          statuses_[i] = *status;
          continue;
        }
      }
      waiting_[still] = waiting_[k];
      waiting_links_[still++] = i;
    }
    pending = still;
    stop = left == 0 || (interrupt_ != nullptr && ready <= 0 && interrupt_());
  }
  for (std::size_t k = 0; k < pending; ++k)
    statuses_[waiting_links_[k]] = links_[waiting_links_[k]]->abandon();
}

}  // namespace afd_comm
