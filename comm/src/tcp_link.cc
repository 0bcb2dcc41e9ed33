// Backend tcp, sender: one connection, frames gathered from the caller's memory.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "backends.h"
#include "driven_link.h"
#include "packed_times.h"
#include "proxy_link.h"
#include "socket.h"
#include "tcp_receiver.h"
#include "tcp_wire.h"
#include "trace_clock.h"
#include "zero_copy.h"

namespace afd_comm {
namespace {

Welcome greet(const Fd& fd, const TcpAddress& a, SlotRange slots, uint64_t deadline,
              Interrupt interrupt) {
  Hello hello{kHelloMagic, kTcpVersion, {}, slots.first, slots.count};
  std::memcpy(hello.token, a.token.data(), a.token.size());
  // A new socket's buffer always has room for these few bytes.
  if (send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
    throw CommError("cannot greet the region at " + place(a) + ": " + errno_text(errno) +
                    "; is it shutting down?");
  Welcome welcome{};
  receive_all(fd, &welcome, sizeof welcome, deadline, a, interrupt);
  if (welcome.magic != kWelcomeMagic)
    throw CommError("the service at " + place(a) + " is not a region; check the address");
  if (welcome.version != kTcpVersion)
    throw CommError("the region at " + place(a) + " uses protocol version " +
                    std::to_string(welcome.version) + ", but this library uses " +
                    std::to_string(kTcpVersion) + "; install the same afd_comm on both sides");
  if (welcome.status != static_cast<int32_t>(Status::Ok))
    throw CommError("the region at " + place(a) + " refused slots " + std::to_string(slots.first) +
                    " to " + std::to_string(uint64_t{slots.first} + slots.count - 1) + " (it has " +
                    std::to_string(welcome.slots) + "); both sides must use the same topology");
  return welcome;
}

// A send without a copy waits for the peer's acknowledgement and costs a notification; copying 64
// KiB takes about 3 us.
constexpr uint64_t kZeroCopyFrom = 64 * 1024;

bool ends_on_one_host(int fd) {
  SocketAddress near, far;
  near.length = far.length = sizeof near.storage;
  return getsockname(fd, near.get(), &near.length) == 0 &&
         getpeername(fd, far.get(), &far.length) == 0 && host_of(near) == host_of(far);
}

class TcpLink final : public DrivenLink {
 public:
  TcpLink(Fd fd, const Welcome& region, const LinkOptions& options)
      : DrivenLink(options.trace),
        fd_(std::move(fd)),
        slots_(region.slots),
        slot_bytes_(region.slot_bytes),
        options_(options),
        creator_(getpid()),
        same_host_(ends_on_one_host(fd_.get())),
        zero_copy_(options.zero_copy_from < 0 ? kZeroCopyFrom
                                              : static_cast<uint64_t>(options.zero_copy_from)),
        marks_(region.slots, 0) {}

  ~TcpLink() override { close(); }

  const char* backend() const override { return "tcp"; }
  bool may_block() const override { return true; }

  Status post(const Message& m) override {
    std::optional<Status> status = begin(m);
    if (status) return *status;
    const uint64_t deadline = deadline_after_us(options_.timeout_us);
    while (!status) {
      if (poll_until(fd_.get(), POLLOUT, deadline, options_.interrupt) != Poll::Ready)
        return abandon();
      status = advance();
    }
    return *status;
  }

  std::optional<Status> begin(const Message& m) override {
    const Status refused = check(m);
    if (refused != Status::Ok) return refused;
    const uint64_t posted = traced() ? trace_now_ns() : 0;
    if (!take_turn()) return Status::Deadline;
    return begin_frame(m, posted, nullptr);
  }

  Start start(const Message& m, const uint64_t* available, Status& outcome) override {
    outcome = check(m);
    if (outcome != Status::Ok) return Start::Done;
    const uint64_t posted = traced() ? trace_now_ns() : 0;
    if (busy_.exchange(true, std::memory_order_acquire)) return Start::Refused;
    const std::optional<Status> status = begin_frame(m, posted, available);
    if (!status) return Start::Begun;
    outcome = *status;
    return Start::Done;
  }
  std::optional<Status> go_on(uint32_t) override { return advance(); }
  Status give_up(uint32_t) override { return abandon(); }
  Limits limits() const override { return {slots_, slot_bytes_, options_.slots}; }

  Status health() const override {
    if (closed_.load(std::memory_order_acquire)) return Status::Closed;
    return farewell(Status::Ok, MSG_PEEK);
  }

  std::optional<Status> advance() override {
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
      if (available_ != nullptr && !cut_to_available(run, ready)) return std::nullopt;
      const int flags =
          MSG_NOSIGNAL | MSG_DONTWAIT | (in_place ? MSG_ZEROCOPY : 0) | (more ? MSG_MORE : 0);
      const ssize_t n = sendmsg(fd_.get(), &run, flags);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN) return std::nullopt;
        if (errno == ENOBUFS && in_place) {
          refused = true;
          continue;
        }
        return finish(ended_ = closed_ ? Status::Closed : farewell(Status::PeerGone));
      }
      begun_ = begun_ || n > 0;
      if (in_place) marks_[head_.slot] = zero_copy_.sent();
      skip(static_cast<std::size_t>(n));
      sent_ += static_cast<std::size_t>(n);
    }
    return finish(Status::Ok);
  }

  void register_memory(void* address, uint64_t nbytes, Device device) override {
    // A socket cannot send from device memory. And to the same host the kernel always copies, so
    // zero copy would only add bookkeeping.
    if (!device.is_cpu() || (same_host_ && options_.zero_copy_from < 0)) return;
    if (take_turn()) {
      zero_copy_.allow(fd_.get(), address, nbytes);
      finish(Status::Ok);
    }
  }

  Status wait_sent(uint32_t slot, int64_t timeout_us) override {
    if (slot >= slots_) return Status::BadHeader;
    const uint64_t deadline = deadline_after_us(timeout_us);
    while (true) {
      if (!take_turn()) return Status::Deadline;
      zero_copy_.reap(fd_.get());
      const bool done = zero_copy_.done(marks_[slot]);
      finish(Status::Ok);
      if (done) return Status::Ok;
      // Waits for the error queue only, which poll always reports.
      if (poll_until(fd_.get(), 0, deadline, options_.interrupt) != Poll::Ready)
        return Status::Deadline;
    }
  }

  Status abandon() override {
    // A partly sent frame cannot be withdrawn: the receiver would read the next frame as its rest.
    if (begun_) {
      ended_ = Status::Closed;
      shutdown(fd_.get(), SHUT_RDWR);
    }
    return finish(Status::Deadline);
  }

  int pollable() const override { return fd_.get(); }

  void close() override {
    if (closed_.exchange(true, std::memory_order_acq_rel)) return;
    // The descriptor stays open until destruction, because another thread may be about to use it. A
    // forked child's copy of this object must not end its parent's connection.
    if (getpid() == creator_) shutdown(fd_.get(), SHUT_RDWR);
  }

 private:
  // Returns the receiver's reason if it hung up, else `otherwise`.
  Status farewell(Status otherwise, int flags = 0) const {
    uint8_t reason = 0;
    const ssize_t n = recv(fd_.get(), &reason, 1, MSG_DONTWAIT | flags);
    if (n == 1)
      return reason == static_cast<uint8_t>(Status::Closed) ? Status::Closed : Status::PeerGone;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return otherwise;
    return Status::PeerGone;
  }

  Status check(const Message& m) const {
    if (closed_.load(std::memory_order_acquire)) return Status::Closed;
    return check_message(m, slots_, slot_bytes_, options_.slots);
  }

  // Needs the turn. `posted`: 0 without tracing.
  std::optional<Status> begin_frame(const Message& m, uint64_t posted, const uint64_t* available) {
    if (ended_ == Status::Ok) ended_ = farewell(Status::Ok);
    if (ended_ != Status::Ok) return finish(ended_);
    load(m, posted != 0);
    available_ = available;
    if (posted != 0) {
      head_.times = times_of(m, posted);
      head_.times.sent = static_cast<int64_t>(trace_now_ns());
    }
    return advance();
  }

  // Limits the run to the bytes that may be read by now, in `ready`. Returns false if there are
  // none.
  bool cut_to_available(msghdr& run, iovec* ready) const {
    uint64_t left = sizeof head_ + *available_ - sent_;
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

  void load(const Message& m, bool trace) {
    head_ = FrameHead{};
    head_.magic = kFrameMagic;
    head_.slot = m.slot;
    head_.flag = m.flag;
    head_.part_count = static_cast<uint32_t>(m.part_count);
    head_.header = m.header;
    head_.header.traced = trace ? kTimesInLine : kNotTraced;
    pieces_[0] = {&head_, sizeof head_};
    in_place_[0] = false;
    const bool zero_copy = options_.zero_copy_from >= 0 || !zero_copy_.copied();
    for (std::size_t i = 0; i < m.part_count; ++i) {
      head_.parts[i] = {m.parts[i].offset, m.parts[i].nbytes};
      in_place_[1 + i] = zero_copy && zero_copy_.wants(m.parts[i].data, m.parts[i].nbytes);
      pieces_[1 + i] = {const_cast<void*>(m.parts[i].data), m.parts[i].nbytes};
    }
    unsent_.msg_iov = pieces_;
    unsent_.msg_iovlen = 1 + m.part_count;
    begun_ = false;
    sent_ = 0;
  }

  void skip(std::size_t sent) {
    while (unsent_.msg_iovlen != 0 && sent >= unsent_.msg_iov->iov_len) {
      sent -= unsent_.msg_iov->iov_len;
      ++unsent_.msg_iov;
      --unsent_.msg_iovlen;
    }
    if (unsent_.msg_iovlen == 0) return;
    unsent_.msg_iov->iov_base = static_cast<char*>(unsent_.msg_iov->iov_base) + sent;
    unsent_.msg_iov->iov_len -= sent;
  }

  // Sends one frame at a time. Not a mutex, because waiting for another thread's frame has a
  // deadline too.
  bool take_turn() {
    if (!busy_.exchange(true, std::memory_order_acquire)) return true;
    const uint64_t deadline = deadline_after_us(options_.timeout_us);
    while (busy_.exchange(true, std::memory_order_acquire)) {
      if (now_ns() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  Status finish(Status status) {
    busy_.store(false, std::memory_order_release);
    return status;
  }

  Fd fd_;
  uint32_t slots_;
  uint64_t slot_bytes_;
  LinkOptions options_;
  pid_t creator_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> busy_{false};  // from begin() to its outcome; guards the members below
  Status ended_ = Status::Ok;
  bool same_host_;
  ZeroCopy zero_copy_;
  std::vector<uint64_t> marks_;  // per slot: the last send from registered memory
  FrameHead head_{};
  bool in_place_[1 + kMaxParts] = {};  // which pieces are sent without a copy
  iovec pieces_[1 + kMaxParts] = {};
  msghdr unsent_{};                      // what the kernel has not taken yet
  bool begun_ = false;                   // whether it has taken any
  uint64_t sent_ = 0;                    // how many bytes it has taken
  const uint64_t* available_ = nullptr;  // see start()
};

std::unique_ptr<Link> open_link_tcp(const std::string& address, const LinkOptions& options) {
  const TcpAddress to = parse_tcp(address);
  const uint64_t deadline = deadline_after_us(options.timeout_us);
  Fd fd = connect_until(to, deadline, options.interrupt);
  const Welcome welcome = greet(fd, to, options.slots, deadline, options.interrupt);
  return std::make_unique<ProxyLink>(std::make_unique<TcpLink>(std::move(fd), welcome, options),
                                     options);
}

}  // namespace

const Backend tcp_backend{"tcp", true, open_link_tcp, open_tcp_receiver};

}  // namespace afd_comm
