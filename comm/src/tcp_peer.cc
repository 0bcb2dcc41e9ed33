#include "tcp_peer.h"

#include <sys/socket.h>

#include <algorithm>

#include "afd_comm/link.h"
#include "packed_times.h"
#include "trace_clock.h"

namespace afd_comm {
TcpPeer::TcpPeer(const Memory& memory, SlotRange slots, uint64_t serial)
    : memory_(memory), slots_(slots), serial_(serial) {}

TcpPeer::~TcpPeer() {
  if (serial_ != 0) end_claim(memory_, slots_, serial_);
}

void TcpPeer::join(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fds_.push_back(fd);
}

void TcpPeer::leave(int fd) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fds_.erase(std::remove(fds_.begin(), fds_.end(), fd), fds_.end());
}

void TcpPeer::end(std::optional<Status> reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_.exchange(true, std::memory_order_acq_rel) || fds_.empty()) return;
  if (reason) {
    const uint8_t byte = static_cast<uint8_t>(*reason);
    // If the socket has no room, the sender learns that the peer is gone, but not why.
    static_cast<void>(send(fds_[0], &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  for (const int fd : fds_) shutdown(fd, SHUT_RDWR);
}

TcpPeer::Turn TcpPeer::turn(const FrameHead& s) {
  // Of a link that has ended, the stripe that this one waits for may never come.
  if (ended() || s.stripes == 0 || s.stripes > kMaxTcpStripes) return Turn::Never;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (s.sequence < next_) return Turn::Never;
  if (s.sequence - next_ >= kWindow) return Turn::Later;
  for (uint64_t earlier = next_; earlier < s.sequence; ++earlier) {
    const Message& m = at(earlier);
    // Nothing is known of a message before its first stripe.
    if (m.first.sequence == 0 || (m.first.slot == s.slot && !m.whole())) return Turn::Later;
  }
  Message& m = at(s.sequence);
  if (m.first.sequence == 0) {
    m = {s, 0, 0};
    return Turn::Now;
  }
  const bool same = m.first.slot == s.slot && m.first.stripes == s.stripes &&
                    m.first.flag == s.flag && m.first.header.nbytes == s.header.nbytes;
  return same && !m.whole() ? Turn::Now : Turn::Never;
}

bool TcpPeer::arrived(const FrameHead& s, uint64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Message& m = at(s.sequence);
  if (m.first.sequence != s.sequence || m.whole()) return false;
  ++m.arrived;
  m.bytes += nbytes;
  if (m.whole() && m.bytes != static_cast<uint64_t>(m.first.header.nbytes)) return false;
  while (at(next_).first.sequence == next_ && at(next_).whole()) {
    if (!ring(at(next_).first)) return false;
    at(next_).first.sequence = 0;
    ++next_;
  }
  return true;
}

bool TcpPeer::ring(const FrameHead& m) const {
  // A newer writer may have claimed the slot since the head was read.
  if (!holds(m.slot)) return false;
  SlotControl& control = memory_.control(m.slot);
  control.header = m.header;
  control.header.traced = m.header.traced != kNotTraced ? kTimesInLine : kNotTraced;
  if (m.header.traced != kNotTraced) {
    control.times = m.times;
    control.times.arrived = static_cast<int64_t>(trace_now_ns());
  }
  memory_.ring(m.slot, m.flag);
  return true;
}

std::shared_ptr<TcpPeer> TcpPeers::greet(const Hello& hello, Welcome& answer) {
  answer = Welcome{};
  // Send no reply to a peer without the token.
  if (hello.magic != kHelloMagic || !same_token(hello.token, token_.data())) return nullptr;
  answer = {kWelcomeMagic, kTcpVersion, static_cast<int32_t>(Status::Ok), memory_.geometry().slots,
            memory_.geometry().slot_bytes};
  if (hello.version != kTcpVersion) return nullptr;
  for (auto known = peers_.begin(); known != peers_.end();)
    known = known->second.expired() ? peers_.erase(known) : std::next(known);
  const SlotRange range{hello.first, hello.count};
  const auto found = peers_.find(hello.link);
  std::shared_ptr<TcpPeer> peer = found == peers_.end() ? nullptr : found->second.lock();
  if (hello.number != 0) {
    if (peer != nullptr && !peer->ended() && hello.number < kMaxTcpConnections) return peer;
    answer.status = static_cast<int32_t>(Status::Closed);
    return nullptr;
  }
  // The sender knows its own request and gets the geometry, so it composes the error message.
  answer.status = static_cast<int32_t>(Status::Capacity);
  if (peer != nullptr) return nullptr;
  try {
    const uint64_t serial =
        take_claim(memory_, range, 0, claim_lock_fd_, deadline_after_us(kClaimLockUs));
    peer = std::make_shared<TcpPeer>(memory_, range, serial);
  } catch (const CommError&) {
    return nullptr;
  }
  answer.status = static_cast<int32_t>(Status::Ok);
  peers_[hello.link] = peer;
  return peer;
}

std::vector<std::shared_ptr<TcpPeer>> TcpPeers::older(const TcpPeer& newcomer) {
  std::vector<std::shared_ptr<TcpPeer>> found;
  for (const auto& [link, known] : peers_) {
    std::shared_ptr<TcpPeer> peer = known.lock();
    if (peer != nullptr && peer.get() != &newcomer && peer->slots().overlaps(newcomer.slots()))
      found.push_back(std::move(peer));
  }
  return found;
}

}  // namespace afd_comm
