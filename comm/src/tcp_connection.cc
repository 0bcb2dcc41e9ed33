#include "tcp_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "afd_comm/link.h"

namespace afd_comm {
TcpConnection::TcpConnection(Fd fd, TcpPeers& peers, std::shared_ptr<Accelerator> accelerator)
    : fd_(std::move(fd)),
      peers_(peers),
      accelerator_(std::move(accelerator)),
      accepted_ns_(now_ns()) {}

TcpConnection::~TcpConnection() {
  if (peer_ == nullptr) return;
  peer_->end(std::nullopt);
  peer_->leave(fd_.get());
}

bool TcpConnection::on_readable() {
  drained_ = false;
  if (lands() && !tell_landed(false)) return false;
  if (phase_ == Phase::Hello) {
    const int filled = fill(&hello_, kHelloStart);
    if (filled <= 0) return filled == 0;
    if (hello_.magic != kHelloMagic || hello_.version != kTcpVersion) return accept_hello();
    phase_ = Phase::Greeting;
  }
  if (phase_ == Phase::Greeting) {
    const int filled = fill(&hello_.link, sizeof hello_ - kHelloStart);
    return filled > 0 ? accept_hello() : filled == 0;
  }
  if (phase_ == Phase::Head) {
    const int filled = fill(&head_, sizeof head_);
    if (filled <= 0) return filled == 0;
    if (!accept_head()) return false;
  }
  if (phase_ == Phase::Turn && !take_turn()) return false;
  return phase_ == Phase::Turn || read_body();
}

int TcpConnection::fill(void* target, std::size_t size) {
  const ssize_t n = recv(fd_.get(), static_cast<char*>(target) + have_, size - have_, MSG_DONTWAIT);
  if (n < 0) {
    drained_ = errno == EAGAIN;
    return errno == EAGAIN || errno == EINTR ? 0 : -1;
  }
  if (n == 0) return -1;
  have_ += static_cast<std::size_t>(n);
  if (have_ < size) return 0;
  have_ = 0;
  return 1;
}

bool TcpConnection::accept_hello() {
  Welcome welcome;
  peer_ = peers_.greet(hello_, welcome);
  if (welcome.magic == 0) return false;
  // Greeted, even if refused: the sender gets an answer.
  phase_ = Phase::Head;
  if (peer_ != nullptr) peer_->join(fd_.get());
  const ssize_t n = send(fd_.get(), &welcome, sizeof welcome, MSG_NOSIGNAL | MSG_DONTWAIT);
  return peer_ != nullptr && n == static_cast<ssize_t>(sizeof welcome);
}

bool TcpConnection::accept_head() {
  if (head_.magic != kFrameMagic || head_.part_count > kMaxParts) return false;
  Message message;
  message.slot = head_.slot;
  message.flag = head_.flag;
  message.part_count = head_.part_count;
  uint64_t sum = 0;
  for (std::size_t i = 0; i < message.part_count; ++i) {
    message.parts[i] = Part{head_.parts[i].offset, nullptr, head_.parts[i].nbytes};
    sum += head_.parts[i].nbytes;
  }
  const Memory& memory = peers_.memory();
  const Geometry& g = memory.geometry();
  // Check the parts first: once each fits its slot, the sum cannot overflow.
  if (check_message(message, g.slots, g.slot_bytes, peer_->slots()) != Status::Ok) return false;
  const auto whole = static_cast<uint64_t>(head_.header.nbytes);
  if (head_.header.nbytes < 0 || (head_.stripes == 1 ? sum != whole : sum > whole)) return false;
  if (!peer_->holds(head_.slot)) {
    peer_->end(Status::Closed);
    return false;
  }
  nbytes_ = sum;
  next_piece_ = piece_count_ = 0;
  for (std::size_t i = 0; i < message.part_count; ++i)
    if (message.parts[i].nbytes != 0)
      pieces_[piece_count_++] = {memory.payload(head_.slot) + message.parts[i].offset,
                                 message.parts[i].nbytes};
  phase_ = Phase::Turn;
  return true;
}

bool TcpConnection::take_turn() {
  switch (peer_->turn(head_)) {
    case TcpPeer::Turn::Never:
      return false;
    case TcpPeer::Turn::Later:
      drained_ = true;
      return true;
    case TcpPeer::Turn::Now:
      break;
  }
  phase_ = Phase::Body;
  return true;
}

// The CPU cannot write the device's memory: the bytes land on the host, and are copied from there
// while more arrive. Returns false if the connection must be dropped.
bool TcpConnection::read_into_device() {
  try {
    if (landing_ == nullptr) landing_ = std::make_unique<Landing>(accelerator_);
    if (next_piece_ != piece_count_) {
      iovec& piece = pieces_[next_piece_];
      const Landing::Room room = landing_->room();
      const ssize_t n =
          recv(fd_.get(), room.data, std::min<uint64_t>(room.nbytes, piece.iov_len), MSG_DONTWAIT);
      if (n < 0) {
        drained_ = errno == EAGAIN;
        return errno == EAGAIN || errno == EINTR;
      }
      if (n == 0) return false;
      landing_->arrived(piece.iov_base, static_cast<uint64_t>(n));
      piece.iov_base = static_cast<char*>(piece.iov_base) + n;
      piece.iov_len -= static_cast<std::size_t>(n);
      if (piece.iov_len != 0) return true;
      landing_->flush();
      if (++next_piece_ != piece_count_) return true;
    }
    if (landing_stripes_ == ring_.size() && !tell_landed(true)) return false;
    ring_[(first_landing_ + landing_stripes_++) % ring_.size()] = {head_, nbytes_,
                                                                   landing_->flushed()};
  } catch (const CommError&) {
    return false;
  }
  phase_ = Phase::Head;
  return true;
}

// Tells of the stripes that have landed; with `wait` of all.
bool TcpConnection::tell_landed(bool wait) {
  try {
    if (wait) landing_->finish();
    while (lands() && landing_->landed(ring_[first_landing_].flushed)) {
      const Landed& landed = ring_[first_landing_];
      if (!deliver(landed.stripe, landed.nbytes)) return false;
      first_landing_ = (first_landing_ + 1) % ring_.size();
      --landing_stripes_;
    }
  } catch (const CommError&) {
    return false;
  }
  return true;
}

bool TcpConnection::settle() { return !lands() || tell_landed(true); }

bool TcpConnection::read_body() {
  if (accelerator_ != nullptr) return read_into_device();
  if (next_piece_ != piece_count_) {
    const ssize_t n =
        readv(fd_.get(), pieces_ + next_piece_, static_cast<int>(piece_count_ - next_piece_));
    if (n < 0) {
      drained_ = errno == EAGAIN;
      return errno == EAGAIN || errno == EINTR;
    }
    if (n == 0) return false;
    std::size_t got = static_cast<std::size_t>(n);
    while (next_piece_ != piece_count_ && got >= pieces_[next_piece_].iov_len)
      got -= pieces_[next_piece_++].iov_len;
    if (next_piece_ != piece_count_) {
      pieces_[next_piece_].iov_base = static_cast<char*>(pieces_[next_piece_].iov_base) + got;
      pieces_[next_piece_].iov_len -= got;
      return true;
    }
  }
  phase_ = Phase::Head;
  return deliver(head_, nbytes_);
}

bool TcpConnection::deliver(const FrameHead& stripe, uint64_t nbytes) {
  if (peer_->arrived(stripe, nbytes)) return true;
  if (!peer_->holds(stripe.slot)) peer_->end(Status::Closed);
  return false;
}

}  // namespace afd_comm
