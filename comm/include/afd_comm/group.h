// Group: one call sends one message, or one array of items, to many peers.
#pragma once

#include <poll.h>

#include <cstddef>
#include <vector>

#include "afd_comm/link.h"

namespace afd_comm {

// Made once over links that outlive it. One thread at a time may use it. No function allocates.
class Group {
 public:
  // `timeout_us`: bound of one call, over all links together.
  Group(std::vector<Link*> links, int64_t timeout_us, Interrupt interrupt);

  std::size_t size() const { return links_.size(); }
  bool may_block() const { return may_block_; }

  // What differs between the links; every array has size() entries.
  struct PerLink {
    const uint64_t* flags;   // 0: skip this link; its status is Ok
    const uint32_t* counts;  // null: broadcast; else the number of items for each link
    const Echo* echoes;      // may be null
  };

  // Broadcast: every link gets the whole message. Scatter (`per.counts` is set): each part is an
  // array of items, and its nbytes is the size of one item. Link i gets counts[i] items, which
  // follow those of links 0 to i - 1; its header holds its own count and nbytes. The items of a
  // skipped link are skipped too. Each link has its own outcome, statuses()[i]; a link that has to
  // wait does not delay the others. Returns true if all are Ok.
  bool post(Message message, const PerLink& per);
  const Status* statuses() const { return statuses_.data(); }

 private:
  // Waits for the links that could not take their message at once.
  void finish(std::size_t pending);
  std::vector<Link*> links_;
  int64_t timeout_us_;
  Interrupt interrupt_;
  bool may_block_ = false;
  std::vector<Status> statuses_;
  std::vector<pollfd> waiting_;             // the first entries: links that have not finished
  std::vector<std::size_t> waiting_links_;  // their indices
};

}  // namespace afd_comm
