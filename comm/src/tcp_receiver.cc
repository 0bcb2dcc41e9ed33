// Backend tcp, receiver: one thread that accepts connections and reads frames straight into the
// slots.
#include <fcntl.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "backends.h"
#include "socket.h"
#include "tcp_connection.h"

namespace afd_comm {
namespace {

constexpr std::size_t kMaxConnections = 1024;
// Strangers that say nothing may take up this much, for this long.
constexpr std::size_t kMaxUngreeted = 64;
constexpr uint64_t kGreetNs = 2000000000;
constexpr int kEvents = 64;
// What one connection may have read before the others have their turn.
constexpr int kReadsPerTurn = 64;
// A waiter has nothing better to do than to ask again for the rest of a message; going to sleep
// between its segments would cost a wake-up for each.
constexpr uint64_t kPatienceNs = 50000;
// How often the thread lets others run, about 1 us each, before it looks for events again.
constexpr int kYields = 1000;

class TcpReceiver final : public Receiver {
 public:
  TcpReceiver(const Memory& memory, const Token& token, const std::string& host, uint16_t port)
      : memory_(memory),
        token_(token),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC)),
        kick_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    SocketAddress bound;
    listener_ = listen_on(host, port, bound, "tcp_host");
    address_.host = host_of(bound);
    address_.port = port_of(bound);
    address_.token = token;
    // Its own open file description, so that the lock also excludes links of this very process.
    const std::string self = "/proc/self/fd/" + std::to_string(memory.fd().get());
    claim_lock_ = Fd(open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!epoll_ || !stop_ || !kick_ || !claim_lock_)
      throw CommError("cannot open the descriptors of a tcp receiver: " + errno_text(errno) +
                      "; raise the open-files limit");
    watch(listener_.get());
    watch(stop_.get());
    watch(kick_.get(), EPOLLIN | EPOLLET);
    start();
  }

  ~TcpReceiver() override { stop(); }

  std::string address() const override { return format(address_); }

  bool begin_serving() override { return !serving_.exchange(true, std::memory_order_acquire); }
  void end_serving() override { serving_.store(false, std::memory_order_release); }

  bool serve(uint32_t seen, uint64_t timeout_ns) override {
    epoll_event events[kEvents];
    int n = 0;
    if (timeout_ns == 0) {
      n = epoll_wait(epoll_.get(), events, kEvents, 0);
    } else {
      waiting_.store(true, std::memory_order_seq_cst);
      // Either the ringer sees that somebody waits, or we see that it has rung.
      if (memory_.head().arrivals.load(std::memory_order_seq_cst) == seen)
        n = epoll_wait(epoll_.get(), events, kEvents,
                       static_cast<int>((timeout_ns + 999999) / 1000000));
      waiting_.store(false, std::memory_order_relaxed);
    }
    if (n <= 0) return n < 0 && errno == EINTR;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < n; ++i) {
      // Strangers and newcomers are the thread's business.
      const auto found = connections_.find(events[i].data.fd);
      if (found != connections_.end() && found->second->greeted())
        serve_connection(found->first, kPatienceNs);
    }
    return false;
  }

  void kick() override {
    const uint64_t one = 1;
    static_cast<void>(!write(kick_.get(), &one, sizeof one));
  }

  void stop() override {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    while (write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    thread_.join();
    const std::lock_guard<std::mutex> lock(mutex_);
    connections_.clear();
    listener_.reset();
  }

 private:
  void start() {
    thread_ = start_thread("afd-tcp", [this] { run(); });
  }

  void watch(int fd, uint32_t wanted = EPOLLIN, int operation = EPOLL_CTL_ADD) const {
    epoll_event event{};
    event.events = wanted;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  // The receiver's own thread. A waiter that serves waits on the same epoll: an event of a greeted
  // connection wakes one of the two, and Linux prefers the one that came last.
  void run() {
    epoll_event events[kEvents];
    int timeout_ms = -1;
    while (true) {
      const int n = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
      bool tell = false;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (int i = 0; i < n; ++i) {
          const int fd = events[i].data.fd;
          if (fd == stop_.get()) return;
          if (fd == listener_.get()) {
            accept_all();
          } else {
            tell = true;
            if (fd != kick_.get()) serve_connection(fd, 0);
          }
        }
        if (ungreeted_ != 0) drop_ungreeted(now_ns());
        timeout_ms = ungreeted_ == 0 ? -1 : 250;
      }
      if (tell) tell_waiter();
    }
  }

  // A waiter asleep in serve() learns of what this thread did, or of the kick that it took. Until
  // the waiter has it, this thread must not wait for events, or it would take this kick, too.
  void tell_waiter() {
    if (!waiting_.load(std::memory_order_seq_cst)) return;
    kick();
    for (int i = 0; i < kYields && waiting_.load(std::memory_order_relaxed); ++i) sched_yield();
  }

  void accept_all() {
    while (Fd fd = accept_connection(listener_)) {
      if (connections_.size() >= kMaxConnections) continue;
      tune(fd.get());
      const int number = fd.get();
      connections_[number] =
          std::make_unique<TcpConnection>(std::move(fd), memory_, token_, claim_lock_.get());
      ++ungreeted_;
      watch(number);
      if (ungreeted_ > kMaxUngreeted) drop_ungreeted(0);
    }
  }

  // `patience_ns`: how long to keep asking for the rest of a frame that has begun.
  void serve_connection(int fd, uint64_t patience_ns) {
    const auto found = connections_.find(fd);
    // Dropped while an earlier event of the same batch was handled.
    if (found == connections_.end()) return;
    TcpConnection& connection = *found->second;
    const bool greeted = connection.greeted();
    bool keep = connection.on_readable();
    if (!greeted && connection.greeted()) {
      --ungreeted_;
      if (keep) replace_older(connection);
    }
    // A greeted connection has one event and is then silent until it is armed again: segments that
    // come while a waiter reads must not wake the thread. So all of them are read.
    uint64_t give_up = 0;
    for (int reads = 1; keep && connection.greeted() && reads < kReadsPerTurn;) {
      if (connection.may_have_more()) {
        ++reads;
        give_up = 0;
      } else {
        if (patience_ns == 0 || !connection.in_frame()) break;
        const uint64_t now = now_ns();
        if (give_up == 0) give_up = now + patience_ns;
        if (now >= give_up) break;
      }
      keep = connection.on_readable();
    }
    if (!keep) {
      drop(fd);
    } else if (connection.greeted()) {
      // Armed again, which also tells of what has come since.
      watch(fd, EPOLLIN | EPOLLONESHOT, EPOLL_CTL_MOD);
    }
  }

  void drop(int fd) {
    const auto found = connections_.find(fd);
    if (!found->second->greeted()) --ungreeted_;
    connections_.erase(found);
  }

  // Ends the connections whose slots the newcomer has claimed.
  void replace_older(const TcpConnection& newcomer) {
    std::vector<int> replaced;
    for (const auto& [fd, other] : connections_)
      if (other.get() != &newcomer && other->slots().overlaps(newcomer.slots()))
        replaced.push_back(fd);
    for (const int fd : replaced) {
      connections_[fd]->say_farewell(Status::Closed);
      drop(fd);
    }
  }

  // now == 0: makes room by dropping the oldest one, else drops those that have had their time.
  void drop_ungreeted(uint64_t now) {
    std::vector<std::pair<uint64_t, int>> waiting;
    for (const auto& [fd, connection] : connections_)
      if (!connection->greeted()) waiting.emplace_back(connection->accepted_ns(), fd);
    if (now == 0) {
      const auto oldest = std::min_element(waiting.begin(), waiting.end());
      if (oldest != waiting.end()) drop(oldest->second);
      return;
    }
    for (const auto& [since, fd] : waiting)
      if (now - since > kGreetNs) drop(fd);
  }

  const Memory& memory_;
  Token token_;
  Fd epoll_;
  Fd stop_;
  Fd kick_;
  Fd listener_;
  Fd claim_lock_;
  TcpAddress address_;
  std::atomic<bool> serving_{false};  // a waiter does the work
  std::atomic<bool> waiting_{false};  // and may be asleep in epoll_wait
  std::mutex mutex_;  // guards the rest; held while bytes are read, never while waiting
  std::unordered_map<int, std::unique_ptr<TcpConnection>> connections_;
  std::size_t ungreeted_ = 0;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Receiver> open_tcp_receiver(const Memory& memory, const Token& token,
                                            const std::string& host, uint16_t port) {
  return std::make_unique<TcpReceiver>(memory, token, host, port);
}

}  // namespace afd_comm
