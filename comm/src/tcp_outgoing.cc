#include "tcp_outgoing.h"

#include <algorithm>
#include <cerrno>

#include "socket.h"

namespace afd_comm {
namespace {

// A send without a copy waits for the peer's acknowledgement and costs a notification; copying 64
// KiB takes about 3 us.
constexpr uint64_t kZeroCopyFrom = 64 * 1024;

bool ends_on_one_host(int fd) {
  SocketAddress near, far;
  near.length = far.length = sizeof near.storage;
  return getsockname(fd, near.get(), &near.length) == 0 &&
         getpeername(fd, far.get(), &far.length) == 0 && host_of(near) == host_of(far);
}

}  // namespace

TcpOutgoing::TcpOutgoing(Fd fd, uint32_t slots, int64_t zero_copy_from)
    : fd_(std::move(fd)),
      zero_copy_from_(zero_copy_from),
      same_host_(ends_on_one_host(fd_.get())),
      zero_copy_(zero_copy_from < 0 ? kZeroCopyFrom : static_cast<uint64_t>(zero_copy_from)),
      marks_(slots, 0) {}

void TcpOutgoing::load(const FrameHead& head, const Message& m, uint64_t begin, uint64_t end) {
  head_ = head;
  head_.part_count = 0;
  stripe_begin_ = begin;
  pieces_[0] = {&head_, sizeof head_};
  in_place_[0] = false;
  const bool zero_copy = zero_copy_from_ >= 0 || !zero_copy_.copied();
  uint64_t at = 0;  // of the part in the message
  for (std::size_t i = 0; i < m.part_count; at += m.parts[i++].nbytes) {
    const Part& part = m.parts[i];
    const uint64_t first = std::max(begin, at), last = std::min(end, at + part.nbytes);
    if (first >= last) continue;
    const std::size_t n = head_.part_count++;
    const uint8_t* const data = static_cast<const uint8_t*>(part.data) + (first - at);
    head_.parts[n] = {part.offset + (first - at), last - first};
    in_place_[1 + n] = zero_copy && zero_copy_.wants(data, last - first);
    pieces_[1 + n] = {const_cast<uint8_t*>(data), last - first};
  }
  unsent_.msg_iov = pieces_;
  unsent_.msg_iovlen = 1 + head_.part_count;
  sent_ = 0;
}

TcpOutgoing::Progress TcpOutgoing::advance(const Available* available) {
  // Completed zero-copy sends also make the socket look ready.
  zero_copy_.reap(fd_.get());
  bool refused = false;  // the kernel has no room for another send without a copy
  while (unsent_.msg_iovlen != 0) {
    const bool in_place = !refused && in_place_[unsent_.msg_iov - pieces_];
    msghdr run = unsent_;
    run.msg_iovlen = 1;
    while (run.msg_iovlen < unsent_.msg_iovlen &&
           (refused || in_place_[run.msg_iov + run.msg_iovlen - pieces_] == in_place))
      ++run.msg_iovlen;
    const bool more = run.msg_iovlen < unsent_.msg_iovlen;
    iovec ready[1 + kMaxParts];
    if (available != nullptr &&
        !cut_to_available(run, ready, available->load(std::memory_order_acquire)))
      return Progress::Starved;
    const int flags =
        MSG_NOSIGNAL | MSG_DONTWAIT | (in_place ? MSG_ZEROCOPY : 0) | (more ? MSG_MORE : 0);
    const ssize_t n = sendmsg(fd_.get(), &run, flags);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) return Progress::Full;
      if (errno == ENOBUFS && in_place) {
        refused = true;
        continue;
      }
      return Progress::Failed;
    }
    begun_ = begun_ || n > 0;
    if (in_place) marks_[head_.slot] = zero_copy_.sent();
    skip(static_cast<std::size_t>(n));
    sent_ += static_cast<std::size_t>(n);
  }
  return Progress::Done;
}

// Limits the run to the bytes that may be read by now, in `ready`. Returns false if there are none.
bool TcpOutgoing::cut_to_available(msghdr& run, iovec* ready, uint64_t available) const {
  if (available < stripe_begin_) return false;
  uint64_t left = sizeof head_ + (available - stripe_begin_) - sent_;
  if (left == 0) return false;
  std::size_t count = 0;
  for (; count < run.msg_iovlen && left != 0; ++count) {
    ready[count] = run.msg_iov[count];
    ready[count].iov_len = std::min<uint64_t>(ready[count].iov_len, left);
    left -= ready[count].iov_len;
  }
  run.msg_iov = ready;
  run.msg_iovlen = count;
  return true;
}

void TcpOutgoing::skip(std::size_t sent) {
  while (unsent_.msg_iovlen != 0 && sent >= unsent_.msg_iov->iov_len) {
    sent -= unsent_.msg_iov->iov_len;
    ++unsent_.msg_iov;
    --unsent_.msg_iovlen;
  }
  if (unsent_.msg_iovlen == 0) return;
  unsent_.msg_iov->iov_base = static_cast<char*>(unsent_.msg_iov->iov_base) + sent;
  unsent_.msg_iov->iov_len -= sent;
}

void TcpOutgoing::forget() {
  unsent_.msg_iovlen = 0;
  begun_ = false;
}

void TcpOutgoing::allow(const void* address, uint64_t nbytes) {
  // To the same host the kernel always copies, so zero copy would only add bookkeeping.
  if (!same_host_ || zero_copy_from_ >= 0) zero_copy_.allow(fd_.get(), address, nbytes);
}

bool TcpOutgoing::left(uint32_t slot) {
  zero_copy_.reap(fd_.get());
  return zero_copy_.done(marks_[slot]);
}

}  // namespace afd_comm
