// Backend tcp, receiver: one thread that accepts connections and reads frames straight into the
// slots.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
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

class TcpReceiver final : public Receiver {
 public:
  TcpReceiver(const Memory& memory, const Token& token, const std::string& host, uint16_t port)
      : memory_(memory),
        token_(token),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        stop_(eventfd(0, EFD_CLOEXEC)) {
    SocketAddress bound;
    listener_ = listen_on(host, port, bound, "tcp_host");
    address_.host = host_of(bound);
    address_.port = port_of(bound);
    address_.token = token;
    // Its own open file description, so that the lock also excludes links of this very process.
    const std::string self = "/proc/self/fd/" + std::to_string(memory.fd().get());
    claim_lock_ = Fd(open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!epoll_ || !stop_ || !claim_lock_)
      throw CommError("cannot open the descriptors of a tcp receiver: " + errno_text(errno) +
                      "; raise the open-files limit");
    watch(listener_.get());
    watch(stop_.get());
    start();
  }

  ~TcpReceiver() override { stop(); }

  std::string address() const override { return format(address_); }

  void stop() override {
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    while (write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    thread_.join();
    connections_.clear();
    listener_.reset();
  }

 private:
  void start() {
    // Signals belong to the application's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::exception& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw CommError(std::string("cannot start the tcp receiver thread: ") + error.what() +
                      "; raise the limit of processes");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "afd-tcp");
  }

  void watch(int fd) const {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  }

  void run() {
    epoll_event events[kEvents];
    while (true) {
      const int n = epoll_wait(epoll_.get(), events, kEvents, ungreeted_ == 0 ? -1 : 250);
      for (int i = 0; i < n; ++i) {
        const int fd = events[i].data.fd;
        if (fd == stop_.get()) return;
        if (fd == listener_.get()) {
          accept_all();
        } else {
          serve(fd);
        }
      }
      if (ungreeted_ != 0) drop_ungreeted(now_ns());
    }
  }

  void accept_all() {
    while (true) {
      Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        // Out of descriptors: the listener stays readable, so breathe instead of spinning.
        const timespec pause{0, 5000000};
        nanosleep(&pause, nullptr);
        return;
      }
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

  void serve(int fd) {
    const auto found = connections_.find(fd);
    // Dropped while an earlier event of the same batch was handled.
    if (found == connections_.end()) return;
    TcpConnection& connection = *found->second;
    const bool greeted = connection.greeted();
    const bool keep = connection.on_readable();
    if (!greeted && connection.greeted()) {
      --ungreeted_;
      if (keep) replace_older(connection);
    }
    if (!keep) drop(fd);
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
  Fd listener_;
  Fd claim_lock_;
  TcpAddress address_;
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
