// Backend verbs, sender: the control thread. It notices the peer's end. After a path failed, it has
// the receiver close its half and sends the missing stripes again.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "verbs_link.h"

namespace afd_comm {
namespace {

constexpr uint64_t kTickNs = 1000000;     // while a stripe waits for room in a queue
constexpr uint64_t kIdleNs = 1000000000;  // longest sleep while there is nothing to wait for

// How long a NIC may take to acknowledge or fail a request: a second more than all of its tries.
uint64_t patience_of(const VerbsOptions& options) {
  const uint64_t each = uint64_t{4096} << options.timeout;
  return kIdleNs + each * static_cast<uint64_t>(options.retry + 1);
}

}  // namespace

void VerbsLink::run_control() {
  bool waiting = false;
  patience_ns_ = patience_of(*options_.verbs);
  while (!closed_.load(std::memory_order_acquire) && outcome() == Status::Ok) {
    uint64_t deadline = now_ns() + (waiting ? kTickNs : kIdleNs);
    for (const auto& path : paths_)
      if (path->fence_deadline != 0 && !path->fenced)
        deadline = std::min(deadline, path->fence_deadline);
    const uint64_t now = now_ns();
    const uint64_t left = deadline > now ? deadline - now : 0;
    pollfd fds[2] = {{fd_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    const int n = poll(fds, 2, static_cast<int>((left + 999999) / 1000000));
    uint64_t count = 0;
    if (n > 0 && fds[1].revents != 0) static_cast<void>(!read(wake_.get(), &count, sizeof count));
    if (n > 0 && fds[0].revents != 0 && !read_reply()) {
      end(Status::PeerGone, "the receiver hung up");
      return;
    }
    give_up_dead_ports();
    ask_for_fences();
    waiting = resend_lost();
  }
}

// Returns false if the receiver has hung up.
bool VerbsLink::read_reply() {
  uint8_t bytes[4096];
  const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  inbox_.insert(inbox_.end(), bytes, bytes + n);
  while (inbox_.size() >= sizeof(VerbsReply)) {
    VerbsReply reply;
    std::memcpy(&reply, inbox_.data(), sizeof reply);
    const bool fenced = reply.magic == kVerbsFencedMagic;
    if (!fenced && reply.magic != kVerbsFarewellMagic) return false;
    if (fenced && (reply.count != out_.size() || reply.qp >= paths_.size())) return false;
    const std::size_t tail = fenced ? reply.count * sizeof(uint64_t) : 0;
    if (inbox_.size() < sizeof reply + tail) return true;
    std::vector<uint64_t> arrived(tail / sizeof(uint64_t));
    if (tail != 0) std::memcpy(arrived.data(), inbox_.data() + sizeof reply, tail);
    inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<std::ptrdiff_t>(sizeof reply + tail));
    take_reply(reply, arrived);
  }
  return true;
}

void VerbsLink::take_reply(const VerbsReply& reply, const std::vector<uint64_t>& arrived) {
  if (reply.magic == kVerbsFarewellMagic) {
    end(reply.status == static_cast<int32_t>(Status::Closed) ? Status::Closed : Status::PeerGone,
        "the receiver said farewell");
    return;
  }
  paths_[reply.qp]->arrived = arrived;
  paths_[reply.qp]->fenced = true;
}

void VerbsLink::ask_for_fences() {
  const uint32_t alive = alive_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < paths_.size(); ++i) {
    Path& path = *paths_[i];
    if (alive >> i & 1 || path.fenced) continue;
    if (path.fence_deadline != 0) {
      if (now_ns() >= path.fence_deadline)
        end(Status::PeerGone, "the receiver did not confirm that it closed a failed path");
      continue;
    }
    path.fence_deadline = deadline_after_us(options_.timeout_us);
    const VerbsFence fence{kVerbsFenceMagic, i};
    // A few bytes on an otherwise silent connection: they fit, or the connection has ended.
    if (send(fd_.get(), &fence, sizeof fence, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof fence)
      end(Status::PeerGone, "the receiver could not be asked to close a failed path");
  }
}

// Fails the paths of a port that is down, if they have had a stripe for longer than the NIC may
// take. A NIC should report such a stripe itself. The soft-RoCE of Linux 6.1 does not always: if it
// cannot send a request behind one that waits for its acknowledgement, neither ever completes
// (drivers/infiniband/sw/rxe/rxe_req.c: `err` sets req.state, after which a retry is not served).
// With the port up, a stripe may wait for a stopped receiver; the caller's deadline decides.
void VerbsLink::give_up_dead_ports() {
  const uint64_t now = now_ns();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + patience_ns_;
  for (Outgoing& out : out_) {
    const uint32_t open = out.open.load(std::memory_order_acquire);
    const uint32_t order = out.order.load(std::memory_order_relaxed);
    const bool overdue = open != 0 && out.seen == order;
    out.seen = open != 0 ? order : 0;
    for (uint32_t stripe = 0; overdue && stripe < kMaxStripes; ++stripe) {
      const uint8_t path = out.path[stripe].load(std::memory_order_acquire);
      if (!(open >> stripe & 1) || path & kLost) continue;
      if (nics_[paths_[path]->nic]->active(paths_[path]->qp->port().number)) continue;
      fail_path(path, ib::kWcRetryExceeded);
    }
  }
}

// Returns true while work is left that needs another look soon.
bool VerbsLink::resend_lost() {
  bool waiting = false;
  for (uint32_t index = 0; index < out_.size(); ++index) {
    Outgoing& out = out_[index];
    for (uint32_t stripe = 0; stripe < kMaxStripes; ++stripe) {
      const uint8_t state = out.path[stripe].load(std::memory_order_acquire);
      if (!(state & kLost) || !(out.open.load(std::memory_order_acquire) >> stripe & 1)) continue;
      const uint32_t path = state & ~uint32_t{kLost};
      const bool alive = alive_.load(std::memory_order_acquire) >> path & 1;
      // Leave a failed path alone until nothing can arrive over it.
      if (!alive && !paths_[path]->fenced) continue;
      resend(index, stripe, path);
      waiting = waiting || (out.path[stripe].load(std::memory_order_acquire) & kLost) != 0;
    }
  }
  return waiting;
}

void VerbsLink::resend(uint32_t index, uint32_t stripe, uint32_t from) {
  Outgoing& out = out_[index];
  const Path& old = *paths_[from];
  const uint32_t bit = 1u << stripe;
  // Only the acknowledgement was lost.
  if (old.fenced && tag_of(old.arrived[index]) == static_cast<uint8_t>(out.number) &&
      stripes_of(old.arrived[index]) & bit) {
    if (out.open.fetch_and(~bit, std::memory_order_acq_rel) == bit) progress_.notify();
    return;
  }
  const uint32_t alive = alive_.load(std::memory_order_acquire);
  if (alive == 0) {
    end(Status::PeerGone, "no path is left");
    return;
  }
  uint32_t to = (from + 1) % kMaxStripes;
  while (!(alive >> to & 1)) to = (to + 1) % kMaxStripes;
  out.path[stripe].store(static_cast<uint8_t>(to), std::memory_order_release);
  send_stripe(index, stripe, to);
}

}  // namespace afd_comm
