// Backend tcp, receiver: one thread that accepts connections and reads frames straight into the
// slots.
#include "tcp_receiver.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "socket.h"
#include "tcp_connection.h"

namespace afd_comm {
namespace {

constexpr int kEvents = 64;
// How much is read from one connection before the others get their turn.
constexpr int kReadsPerTurn = 64;
// A waiter keeps polling for the rest of a message; sleeping between its segments would cost a
// wake-up for each.
constexpr uint64_t kPatienceNs = 50000;

class TcpReceiver final : public Receiver {
 public:
  TcpReceiver(const Memory& memory, const Token& token, const RegionOptions& options)
      : memory_(memory),
        token_(token),
        accelerator_(options.device.is_cpu() ? nullptr : open_accelerator(options.device)),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        peers_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC)),
        kick_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    SocketAddress bound;
    listener_ = listen_on(options.tcp_host, options.tcp_port, bound, "tcp_host");
    address_.host = host_of(bound);
    address_.port = port_of(bound);
    address_.token = token;
    // A separate open file description, so that the lock also excludes links of this process.
    const std::string self = "/proc/self/fd/" + std::to_string(memory.fd().get());
    claim_lock_ = Fd(open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!epoll_ || !peers_ || !stop_ || !kick_ || !claim_lock_)
      throw CommError("cannot open the descriptors of a tcp receiver: " + errno_text(errno) +
                      "; raise the open-files limit");
    watch(epoll_, listener_.get());
    watch(epoll_, stop_.get());
    watch(epoll_, peers_.get());
    watch(peers_, kick_.get(), EPOLLIN | EPOLLET);
    start();
  }

  ~TcpReceiver() override { stop(); }

  std::string address() const override { return format(address_); }

  // While a waiter serves, the thread does not watch the peers. On a core that both share, every
  // message would wake the thread in vain, and sometimes it would win and make the waiter wait for
  // a time slice.
  bool begin_serving() override {
    if (serving_.exchange(true, std::memory_order_acquire)) return false;
    watch(epoll_, peers_.get(), 0, EPOLL_CTL_MOD);
    return true;
  }
  void end_serving() override {
    watch(epoll_, peers_.get(), EPOLLIN, EPOLL_CTL_MOD);
    serving_.store(false, std::memory_order_release);
  }

  bool serve(uint32_t seen, uint64_t timeout_ns) override {
    epoll_event events[kEvents];
    int n = 0;
    if (timeout_ns == 0) {
      n = epoll_wait(peers_.get(), events, kEvents, 0);
    } else {
      waiting_.store(true, std::memory_order_seq_cst);
      // Either the ringing thread sees that we wait, or we see its doorbell.
      if (memory_.head().arrivals.load(std::memory_order_seq_cst) == seen)
        n = epoll_wait(peers_.get(), events, kEvents,
                       static_cast<int>((timeout_ns + 999999) / 1000000));
      waiting_.store(false, std::memory_order_relaxed);
    }
    if (n <= 0) return n < 0 && errno == EINTR;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < n; ++i)
      if (events[i].data.fd != kick_.get()) serve_connection(events[i].data.fd, kPatienceNs);
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

  static void watch(const Fd& epoll, int fd, uint32_t wanted = EPOLLIN,
                    int operation = EPOLL_CTL_ADD) {
    epoll_event event{};
    event.events = wanted;
    event.data.fd = fd;
    epoll_ctl(epoll.get(), operation, fd, &event);
  }

  // The receiver's thread: always serves new connections, and peers while no waiter serves them.
  void run() {
    epoll_event events[kEvents];
    int timeout_ms = -1;
    while (true) {
      const int n = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
      const std::lock_guard<std::mutex> lock(mutex_);
      bool tell = false;
      for (int i = 0; i < n; ++i) {
        const int fd = events[i].data.fd;
        if (fd == stop_.get()) return;
        if (fd == listener_.get()) {
          accept_all();
          continue;
        }
        tell = true;
        if (fd == peers_.get())
          serve_peers();
        else
          serve_connection(fd, 0);
      }
      // A waiter that has started to serve may be asleep. Wake it, so that it sees the work done
      // here or the kick consumed here.
      if (tell && waiting_.load(std::memory_order_seq_cst)) kick();
      if (ungreeted_ != 0) drop_ungreeted(now_ns());
      timeout_ms = ungreeted_ == 0 ? -1 : 250;
    }
  }

  void serve_peers() {
    epoll_event events[kEvents];
    const int n = epoll_wait(peers_.get(), events, kEvents, 0);
    for (int i = 0; i < n; ++i)
      if (events[i].data.fd != kick_.get()) serve_connection(events[i].data.fd, 0);
  }

  void accept_all() {
    while (Fd fd = accept_connection(listener_)) {
      if (connections_.size() >= kMaxConnections) continue;
      tune(fd.get());
      const int number = fd.get();
      connections_[number] = std::make_unique<TcpConnection>(std::move(fd), memory_, token_,
                                                             claim_lock_.get(), accelerator_);
      ++ungreeted_;
      watch(epoll_, number);
      if (ungreeted_ > kMaxUngreeted) drop_ungreeted(0);
    }
  }

  // `patience_ns`: how long to poll for the rest of a frame that has begun to arrive.
  void serve_connection(int fd, uint64_t patience_ns) {
    const auto found = connections_.find(fd);
    // The connection was dropped while an earlier event of this batch was handled.
    if (found == connections_.end()) return;
    TcpConnection& connection = *found->second;
    const bool greeted = connection.greeted();
    bool keep = connection.on_readable();
    if (!greeted && connection.greeted()) {
      --ungreeted_;
      if (keep) {
        replace_older(connection);
        watch(epoll_, fd, 0, EPOLL_CTL_DEL);
        watch(peers_, fd);
      }
    }
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
    if (!keep) drop(fd);
  }

  void drop(int fd) {
    const auto found = connections_.find(fd);
    if (!found->second->greeted()) --ungreeted_;
    connections_.erase(found);
  }

  // Ends the connections whose slots the new connection has claimed.
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

  // Drops connections without a greeting: those whose time is over or, with now == 0, the oldest.
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
  std::shared_ptr<Accelerator> accelerator_;  // of the slots' device
  Fd epoll_;  // of the thread: new connections, and peers_ while no waiter serves
  Fd peers_;  // an epoll of its own: connections that have been greeted
  Fd stop_;
  Fd kick_;
  Fd listener_;
  Fd claim_lock_;
  TcpAddress address_;
  std::atomic<bool> serving_{false};  // a waiter serves the connections
  std::atomic<bool> waiting_{false};  // and may be asleep in epoll_wait
  std::mutex mutex_;  // guards the members below; held while reading, never while waiting
  std::unordered_map<int, std::unique_ptr<TcpConnection>> connections_;
  std::size_t ungreeted_ = 0;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Receiver> open_tcp_receiver(const Memory& memory, const Token& token,
                                            const RegionOptions& options) {
  if (options.tcp_host.empty()) return nullptr;
  return std::make_unique<TcpReceiver>(memory, token, options);
}

}  // namespace afd_comm
