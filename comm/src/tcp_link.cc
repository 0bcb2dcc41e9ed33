// Backend tcp, sender: messages over one connection or several.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "backends.h"
#include "driven_link.h"
#include "helpers.h"
#include "packed_times.h"
#include "proxy_link.h"
#include "socket.h"
#include "tcp_outgoing.h"
#include "tcp_receiver.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

Welcome greet(const Fd& fd, const TcpAddress& a, const Hello& hello, uint64_t deadline,
              Interrupt interrupt) {
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
  if (welcome.status == static_cast<int32_t>(Status::Closed))
    throw CommError("another link claimed the slots of the region at " + place(a) +
                    " while this one connected; run each sender once");
  if (welcome.status != static_cast<int32_t>(Status::Ok))
    throw CommError("the region at " + place(a) + " refused slots " + std::to_string(hello.first) +
                    " to " + std::to_string(uint64_t{hello.first} + hello.count - 1) + " (it has " +
                    std::to_string(welcome.slots) + "); both sides must use the same topology");
  return welcome;
}

// CPUs per connection, and the most connections, where the user names no number.
constexpr int kCpusPerConnection = 4;
constexpr int kMaxDefault = 4;
constexpr uint64_t kPauseNs = 5000;
// How long a helper waits for room in a socket before it looks whether it must stop.
constexpr int64_t kHelperSliceUs = 10000;

uint32_t connections_of(const LinkOptions& options) {
  if (options.tcp_connections != 0) return options.tcp_connections;
  return static_cast<uint32_t>(std::clamp(usable_cpus() / kCpusPerConnection, 1, kMaxDefault));
}

// A message is cut into stripes. Every connection takes the next stripe when it has sent its last
// one: the first connection on the thread that posts, the others on helpers' threads. So a message
// waits for no helper, and a connection that is slow gets less.
class TcpLink final : public DrivenLink, private Helped {
 public:
  TcpLink(std::vector<Fd> fds, const Welcome& region, const LinkOptions& options)
      : DrivenLink(options.trace),
        slots_(region.slots),
        slot_bytes_(region.slot_bytes),
        options_(options),
        creator_(getpid()) {
    for (Fd& fd : fds)
      connections_.push_back(
          std::make_unique<TcpOutgoing>(std::move(fd), slots_, options.zero_copy_from));
    if (connections_.size() > 1) helpers_ = Helpers::shared(connections_.size() - 1);
  }

  ~TcpLink() override {
    close();
    if (getpid() != creator_) {
      // In a forked child the helpers' threads do not exist.
      static_cast<void>(new std::shared_ptr<Helpers>(std::move(helpers_)));
    } else if (helpers_ != nullptr) {
      stop_helpers();
    }
  }

  const char* backend() const override { return "tcp"; }
  bool may_block() const override { return true; }

  Status post(const Message& m) override {
    std::optional<Status> status = begin(m);
    const uint64_t deadline = deadline_after_us(options_.timeout_us);
    while (!status) {
      if (!wait(deadline)) return abandon();
      status = advance();
    }
    return *status;
  }

  std::optional<Status> begin(const Message& m) override {
    const Status refused = check(m);
    if (refused != Status::Ok) return refused;
    const uint64_t posted = traced() ? trace_now_ns() : 0;
    if (!take_turn()) return Status::Deadline;
    return begin_message(m, posted, nullptr);
  }

  Start start(const Message& m, const Available* available, Status& outcome) override {
    outcome = check(m);
    if (outcome != Status::Ok) return Start::Done;
    const uint64_t posted = traced() ? trace_now_ns() : 0;
    if (busy_.exchange(true, std::memory_order_acquire)) return Start::Refused;
    const std::optional<Status> status = begin_message(m, posted, available);
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
    TcpOutgoing& first = *connections_[0];
    while (!failed_.load(std::memory_order_relaxed)) {
      if (!first.busy()) {
        // The thread that copies from the device must go on with it: meanwhile the helpers send.
        if (stripes_ > 1 && available_ != nullptr && available_->load() < total_)
          return std::nullopt;
        if (!take_stripe(first)) break;
      }
      switch (first.advance(available_)) {
        case TcpOutgoing::Progress::Done:
          break;
        case TcpOutgoing::Progress::Full:
        case TcpOutgoing::Progress::Starved:
          return std::nullopt;
        case TcpOutgoing::Progress::Failed:
          failed_.store(true, std::memory_order_relaxed);
      }
    }
    if (stripes_ > 1) {
      helpers_->withdraw(*this);
      // Where one connection failed, no helper must wait for another.
      if (failed_.load(std::memory_order_relaxed)) hang_up();
      if (helped()) {
        // Who copies from a device has other messages to look after.
        if (available_ == nullptr) std::this_thread::yield();
        return std::nullopt;
      }
    }
    if (!failed_.load(std::memory_order_acquire)) {
      ++sequence_;
      return finish(Status::Ok);
    }
    hang_up();
    return finish(ended_ = closed_ ? Status::Closed : farewell(Status::PeerGone));
  }

  void register_memory(void* address, uint64_t nbytes, Device device) override {
    // A socket cannot send from device memory.
    if (!device.is_cpu() || !take_turn()) return;
    for (const auto& connection : connections_) connection->allow(address, nbytes);
    finish(Status::Ok);
  }

  Status wait_sent(uint32_t slot, int64_t timeout_us) override {
    if (slot >= slots_) return Status::BadHeader;
    const uint64_t deadline = deadline_after_us(timeout_us);
    for (std::size_t i = 0; i < connections_.size();) {
      if (!take_turn()) return Status::Deadline;
      const bool left = connections_[i]->left(slot);
      finish(Status::Ok);
      // Waits for the error queue only, which poll always reports.
      if (left)
        ++i;
      else if (poll_until(connections_[i]->fd(), 0, deadline, options_.interrupt) != Poll::Ready)
        return Status::Deadline;
    }
    return Status::Ok;
  }

  Status abandon() override {
    if (helpers_ != nullptr) stop_helpers();
    // A partly sent message cannot be withdrawn: the receiver would wait for its rest.
    if (std::any_of(connections_.begin(), connections_.end(),
                    [](const auto& connection) { return connection->begun(); })) {
      ended_ = Status::Closed;
      hang_up();
    }
    for (const auto& connection : connections_) connection->forget();
    return finish(Status::Deadline);
  }

  int pollable() const override { return connections_[0]->fd(); }

  void close() override {
    if (closed_.exchange(true, std::memory_order_acq_rel)) return;
    // The descriptors stay open until destruction, because another thread may be about to use one.
    // A forked child's copy of this object must not end its parent's connections.
    if (getpid() == creator_) hang_up();
  }

 private:
  void hang_up() const {
    for (const auto& connection : connections_) shutdown(connection->fd(), SHUT_RDWR);
  }

  // Returns the receiver's reason if it hung up, else `otherwise`.
  Status farewell(Status otherwise, int flags = 0) const {
    uint8_t reason = 0;
    const ssize_t n = recv(connections_[0]->fd(), &reason, 1, MSG_DONTWAIT | flags);
    if (n == 1)
      return reason == static_cast<uint8_t>(Status::Closed) ? Status::Closed : Status::PeerGone;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return otherwise;
    return Status::PeerGone;
  }

  uint64_t stripe_bytes() const { return options_.tcp_stripe_bytes; }

  Status check(const Message& m) const {
    if (closed_.load(std::memory_order_acquire)) return Status::Closed;
    return check_message(m, slots_, slot_bytes_, options_.slots);
  }

  // Needs the turn. `posted`: 0 without tracing.
  std::optional<Status> begin_message(const Message& m, uint64_t posted,
                                      const Available* available) {
    if (ended_ == Status::Ok) ended_ = farewell(Status::Ok);
    if (ended_ != Status::Ok) return finish(ended_);
    message_ = m;
    available_ = available;
    total_ = 0;
    for (std::size_t i = 0; i < m.part_count; ++i) total_ += m.parts[i].nbytes;
    const bool cut = connections_.size() > 1 && total_ > stripe_bytes();
    stripes_ = cut ? static_cast<uint32_t>((total_ + stripe_bytes() - 1) / stripe_bytes()) : 1;
    head_ = FrameHead{};
    head_.magic = kFrameMagic;
    head_.slot = m.slot;
    head_.flag = m.flag;
    head_.stripes = stripes_;
    head_.sequence = sequence_;
    head_.header = m.header;
    head_.header.traced = posted != 0 ? kTimesInLine : kNotTraced;
    if (posted != 0) {
      head_.times = times_of(m, posted);
      head_.times.sent = static_cast<int64_t>(trace_now_ns());
    }
    for (const auto& connection : connections_) connection->forget();
    failed_.store(false, std::memory_order_relaxed);
    next_stripe_.store(0, std::memory_order_relaxed);
    next_connection_.store(1, std::memory_order_relaxed);
    if (cut) helpers_->offer(*this);
    return advance();
  }

  // Gives the connection the next stripe of the message. Returns false if there is none.
  bool take_stripe(TcpOutgoing& connection) {
    const uint32_t stripe = next_stripe_.fetch_add(1, std::memory_order_relaxed);
    if (stripe >= stripes_) return false;
    const uint64_t begin = stripes_ == 1 ? 0 : stripe * stripe_bytes();
    const uint64_t end = stripe + 1 == stripes_ ? total_ : begin + stripe_bytes();
    connection.load(head_, message_, begin, end);
    return true;
  }

  bool wants_help() const override {
    return next_stripe_.load(std::memory_order_relaxed) < stripes_ &&
           next_connection_.load(std::memory_order_relaxed) < connections_.size();
  }

  void help() override {
    const uint32_t mine = next_connection_.fetch_add(1, std::memory_order_relaxed);
    if (mine >= connections_.size()) return;
    TcpOutgoing& connection = *connections_[mine];
    while (!failed_.load(std::memory_order_relaxed)) {
      if (!connection.busy() && !take_stripe(connection)) return;
      switch (connection.advance(available_)) {
        case TcpOutgoing::Progress::Done:
          break;
        case TcpOutgoing::Progress::Full:
          poll_until(connection.fd(), POLLOUT, deadline_after_us(kHelperSliceUs), nullptr);
          break;
        case TcpOutgoing::Progress::Starved:
          relax_us();
          break;
        case TcpOutgoing::Progress::Failed:
          failed_.store(true, std::memory_order_release);
      }
    }
  }

  // After it returns no helper uses a connection or the message's memory.
  void stop_helpers() {
    helpers_->withdraw(*this);
    failed_.store(true, std::memory_order_relaxed);
    while (helped()) std::this_thread::yield();
  }

  // Waits until advance() has something to do. Returns false at the deadline.
  bool wait(uint64_t deadline) const {
    if (connections_[0]->busy())
      return poll_until(pollable(), POLLOUT, deadline, options_.interrupt) == Poll::Ready;
    nap(kPauseNs);  // helpers send the last stripes
    return now_ns() < deadline && (options_.interrupt == nullptr || !options_.interrupt());
  }

  // Sends one message at a time. Not a mutex, because waiting for another thread's message has a
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

  uint32_t slots_;
  uint64_t slot_bytes_;
  LinkOptions options_;
  pid_t creator_;
  std::shared_ptr<Helpers> helpers_;  // null for one connection
  std::vector<std::unique_ptr<TcpOutgoing>> connections_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> busy_{false};  // from begin() to its outcome; guards the members below
  Status ended_ = Status::Ok;
  uint64_t sequence_ = 1;
  // The message that is sent. Helpers read it between offer() and the last one's leaving.
  Message message_;
  FrameHead head_{};
  uint64_t total_ = 0;  // bytes of its parts
  uint32_t stripes_ = 0;
  const Available* available_ = nullptr;  // see start()
  std::atomic<uint32_t> next_stripe_{0};
  std::atomic<uint32_t> next_connection_{0};  // that no helper uses
  std::atomic<bool> failed_{false};           // a connection failed, or nobody wants the outcome
};

std::unique_ptr<Link> open_link_tcp(const std::string& address, const LinkOptions& options) {
  const TcpAddress to = parse_tcp(address);
  const uint64_t deadline = deadline_after_us(options.timeout_us);
  Hello hello{kHelloMagic, kTcpVersion, {}, options.slots.first, options.slots.count, 0, 0, 0};
  std::memcpy(hello.token, to.token.data(), to.token.size());
  const Token random = random_token();
  std::memcpy(&hello.link, random.data(), sizeof hello.link);
  std::vector<Fd> fds;
  Welcome welcome{};
  for (const uint32_t count = connections_of(options); hello.number < count; ++hello.number) {
    fds.push_back(connect_until(to, deadline, options.interrupt));
    welcome = greet(fds.back(), to, hello, deadline, options.interrupt);
  }
  return std::make_unique<ProxyLink>(std::make_unique<TcpLink>(std::move(fds), welcome, options),
                                     options);
}

}  // namespace

const Backend tcp_backend{"tcp", true, open_link_tcp, open_tcp_receiver};

}  // namespace afd_comm
