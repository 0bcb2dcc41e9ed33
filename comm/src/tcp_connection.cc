#include "tcp_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "afd_comm/link.h"
#include "packed_times.h"
#include "trace_clock.h"

namespace afd_comm {
TcpConnection::TcpConnection(Fd fd, const Memory& memory, const Token& token, int claim_lock_fd,
                             std::shared_ptr<Accelerator> accelerator)
    : fd_(std::move(fd)),
      memory_(memory),
      token_(token),
      claim_lock_fd_(claim_lock_fd),
      accelerator_(std::move(accelerator)),
      accepted_ns_(now_ns()) {}

TcpConnection::~TcpConnection() {
  if (serial_ != 0) end_claim(memory_, slots_, serial_);
}

void TcpConnection::say_farewell(Status reason) const {
  const uint8_t byte = static_cast<uint8_t>(reason);
  static_cast<void>(send(fd_.get(), &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

bool TcpConnection::on_readable() {
  drained_ = false;
  if (phase_ == Phase::Hello) {
    const int filled = fill(&hello_, sizeof hello_);
    return filled > 0 ? accept_hello() : filled == 0;
  }
  if (phase_ == Phase::Head) {
    const int filled = fill(&head_, sizeof head_);
    if (filled <= 0) return filled == 0;
    if (!accept_head()) return false;
  }
  return read_body();
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
  // Send no reply to a peer without the token.
  if (hello_.magic != kHelloMagic || !same_token(hello_.token, token_.data())) return false;
  Welcome welcome{kWelcomeMagic, kTcpVersion, static_cast<int32_t>(Status::Ok),
                  memory_.geometry().slots, memory_.geometry().slot_bytes};
  bool accepted = hello_.version == kTcpVersion;
  if (accepted) {
    const SlotRange range{hello_.first, hello_.count};
    try {
      serial_ = take_claim(memory_, range, 0, claim_lock_fd_, deadline_after_us(kClaimLockUs));
      slots_ = range;
    } catch (const CommError&) {
      // The sender knows its own request and gets the geometry, so it composes the error message.
      welcome.status = static_cast<int32_t>(Status::Capacity);
      accepted = false;
    }
  }
  const ssize_t n = send(fd_.get(), &welcome, sizeof welcome, MSG_NOSIGNAL | MSG_DONTWAIT);
  phase_ = Phase::Head;
  return accepted && n == static_cast<ssize_t>(sizeof welcome);
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
  const Geometry& g = memory_.geometry();
  // Check the parts first: once each fits its slot, the sum cannot overflow.
  if (check_message(message, g.slots, g.slot_bytes, slots_) != Status::Ok) return false;
  if (head_.header.nbytes < 0 || static_cast<uint64_t>(head_.header.nbytes) != sum) return false;
  if (serial_ != 0 && !holds_claim(memory_, head_.slot, serial_)) {
    say_farewell(Status::Closed);
    return false;
  }
  next_piece_ = piece_count_ = 0;
  for (std::size_t i = 0; i < message.part_count; ++i)
    if (message.parts[i].nbytes != 0)
      pieces_[piece_count_++] = {memory_.payload(head_.slot) + message.parts[i].offset,
                                 message.parts[i].nbytes};
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
    landing_->finish();
  } catch (const CommError&) {
    return false;
  }
  return deliver();
}

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
  return deliver();
}

bool TcpConnection::deliver() {
  // A newer writer may have claimed the slot since the head was read.
  if (serial_ != 0 && !holds_claim(memory_, head_.slot, serial_)) {
    say_farewell(Status::Closed);
    return false;
  }
  SlotControl& control = memory_.control(head_.slot);
  control.header = head_.header;
  control.header.traced = head_.header.traced != kNotTraced ? kTimesInLine : kNotTraced;
  if (head_.header.traced != kNotTraced) {
    control.times = head_.times;
    control.times.arrived = static_cast<int64_t>(trace_now_ns());
  }
  memory_.ring(head_.slot, head_.flag);
  phase_ = Phase::Head;
  return true;
}

}  // namespace afd_comm
