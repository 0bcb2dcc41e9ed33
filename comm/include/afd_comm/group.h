// Group: one message, or one batch of rows, to many peers in one call.
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
    const uint64_t* flags;  // 0: this link is left out, and its status is Ok
    const int32_t* rows;    // null: broadcast; else how many of the rows go to each link
    const Echo* echoes;     // may be null
  };

  // Broadcast: the message to every link. Scatter (`per.rows`): a part's nbytes is that of one row,
  // link i gets the rows that follow those of the links before it, and its header's rows and nbytes
  // say so; links left out take their rows along. Each link has its own outcome, statuses()[i]; a
  // link that has to wait does not hold up the others. True: all are Ok.
  bool post(Message message, const PerLink& per);
  const Status* statuses() const { return statuses_.data(); }

 private:
  void settle(std::size_t pending);
  std::vector<Link*> links_;
  int64_t timeout_us_;
  Interrupt interrupt_;
  bool may_block_ = false;
  std::vector<Status> statuses_;
  std::vector<pollfd> waiting_;             // the first entries: links that have not finished
  std::vector<std::size_t> waiting_links_;  // their indices
};

}  // namespace afd_comm
