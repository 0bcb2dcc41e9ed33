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

}  // namespace

void VerbsLink::run_control() {
  bool waiting = false;
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
      end(Status::PeerGone);
      return;
    }
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
    end(reply.status == static_cast<int32_t>(Status::Closed) ? Status::Closed : Status::PeerGone);
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
      if (now_ns() >= path.fence_deadline) end(Status::PeerGone);
      continue;
    }
    path.fence_deadline = deadline_after_us(options_.timeout_us);
    const VerbsFence fence{kVerbsFenceMagic, i};
    // A few bytes on an otherwise silent connection: they fit, or the connection has ended.
    if (send(fd_.get(), &fence, sizeof fence, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof fence)
      end(Status::PeerGone);
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
    end(Status::PeerGone);
    return;
  }
  uint32_t to = (from + 1) % kMaxStripes;
  while (!(alive >> to & 1)) to = (to + 1) % kMaxStripes;
  out.path[stripe].store(static_cast<uint8_t>(to), std::memory_order_release);
  send_stripe(index, stripe, to);
}

}  // namespace afd_comm
