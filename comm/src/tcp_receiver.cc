// Backend tcp, receiver: a thread that accepts connections and reads frames straight into the
// slots. The connections of a link behind its first have threads of their own (tcp_reader.h).
#include "tcp_receiver.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>

#include "poller.h"
#include "socket.h"
#include "tcp_reader.h"

namespace afd_comm {
namespace {

constexpr int kEvents = 64;
// A waiter keeps polling for the rest of a message; sleeping between its segments would cost a
// wake-up for each.
constexpr uint64_t kPatienceNs = 50000;

class TcpReceiver final : public Receiver {
 public:
  TcpReceiver(const Memory& memory, const Token& token, const RegionOptions& options)
      : memory_(memory),
        token_(token),
        spin_ns_(options.device.is_cpu() ? 0 : default_spin_ns()),
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
    peers_known_.emplace(memory_, token_, claim_lock_.get());
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
    readers_.clear();
    connections_.clear();
    listener_.reset();
  }

 private:
  void start() {
    thread_ = start_thread("afd-tcp", [this] { run(); });
  }

  // The receiver's thread: always serves new connections, and peers while no waiter serves them.
  void run() {
    epoll_event events[kEvents];
    int timeout_ms = -1;
    while (true) {
      const int n = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
      const std::lock_guard<std::mutex> lock(mutex_);
      bool worked = false;
      for (int i = 0; i < n; ++i) {
        const int fd = events[i].data.fd;
        if (fd == stop_.get()) return;
        if (fd == listener_.get()) {
          accept_all();
          continue;
        }
        worked = true;
        if (fd == peers_.get())
          serve_peers();
        else
          serve_connection(fd, 0);
      }
      if (worked) tell();
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
      ++ungreeted_;
      watch(epoll_,
            connections_
                .add(std::make_unique<TcpConnection>(std::move(fd), *peers_known_, accelerator_))
                .fd());
      if (ungreeted_ > kMaxUngreeted) drop_ungreeted(0);
    }
  }

  void serve_connection(int fd, uint64_t patience_ns) {
    TcpConnection* connection = connections_.find(fd);
    if (connection == nullptr) return;
    const bool greeted = connection->greeted();
    // A stripe that must wait for its turn leaves the socket readable.
    if (!connections_.serve(fd, patience_ns)) std::this_thread::yield();
    if (greeted) return;
    connection = connections_.find(fd);
    if (connection == nullptr) {
      --ungreeted_;
    } else if (connection->greeted()) {
      --ungreeted_;
      admit(*connection);
    }
  }

  // Gives a greeted connection to the thread that reads from it.
  void admit(TcpConnection& newcomer) {
    const int fd = newcomer.fd();
    watch(epoll_, fd, 0, EPOLL_CTL_DEL);
    if (newcomer.number() == 0) {
      replace_older(*newcomer.peer());
      watch(peers_, fd);
      return;
    }
    try {
      while (readers_.size() < newcomer.number())
        readers_.push_back(std::make_unique<TcpReader>(spin_ns_, [this] { tell(); }));
    } catch (const CommError&) {
      connections_.drop(fd);
      return;
    }
    readers_[newcomer.number() - 1]->add(connections_.take(fd));
  }

  // Ends the links whose slots the new one has claimed: none of their bytes is written any more.
  void replace_older(const TcpPeer& newcomer) {
    for (const std::shared_ptr<TcpPeer>& peer : peers_known_->older(newcomer)) {
      peer->end(Status::Closed);
      connections_.drop_of(*peer);
      for (const auto& reader : readers_) reader->drop_of(*peer);
    }
  }

  // A waiter that has started to serve may be asleep. Wake it, so that it sees the work done by
  // other threads, or the kick that they consumed.
  void tell() {
    if (waiting_.load(std::memory_order_seq_cst)) kick();
  }

  // Drops connections without a greeting: those whose time is over or, with now == 0, the oldest.
  void drop_ungreeted(uint64_t now) {
    std::vector<std::pair<uint64_t, int>> waiting;
    connections_.for_each([&waiting](const TcpConnection& c) {
      if (!c.greeted()) waiting.emplace_back(c.accepted_ns(), c.fd());
    });
    if (now == 0) waiting = {*std::min_element(waiting.begin(), waiting.end())};
    for (const auto& [since, fd] : waiting) {
      if (now != 0 && now - since <= kGreetNs) continue;
      connections_.drop(fd);
      --ungreeted_;
    }
  }

  const Memory& memory_;
  Token token_;
  uint64_t spin_ns_;                          // of the readers: 0 where a waiter may serve
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
  std::optional<TcpPeers> peers_known_;
  TcpConnections connections_;
  std::vector<std::unique_ptr<TcpReader>> readers_;  // of connections 1, 2, ... of every link
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
