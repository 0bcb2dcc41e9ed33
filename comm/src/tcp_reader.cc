#include "tcp_reader.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "afd_comm/process.h"

namespace afd_comm {
namespace {

constexpr int kEventsAtOnce = 64;
// Between two looks at a stripe that must wait for another one.
constexpr uint64_t kStallNs = 20000;

}  // namespace

void watch(const Fd& epoll, int fd, uint32_t wanted, int operation) {
  epoll_event event{};
  event.events = wanted;
  event.data.fd = fd;
  epoll_ctl(epoll.get(), operation, fd, &event);
}

TcpReader::TcpReader(uint64_t spin_ns, std::function<void()> tell)
    : spin_ns_(spin_ns),
      tell_(std::move(tell)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!epoll_ || !stop_)
    throw CommError("cannot open the descriptors of a tcp receiver: " + errno_text(errno) +
                    "; raise the open-files limit");
  watch(epoll_, stop_.get());
  thread_ = start_thread("afd-tcp-read", [this] { run(); });
}

TcpReader::~TcpReader() {
  const uint64_t one = 1;
  while (write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void TcpReader::add(std::unique_ptr<TcpConnection> connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  watch(epoll_, connections_.add(std::move(connection)).fd());
}

void TcpReader::drop_of(const TcpPeer& peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  connections_.drop_of(peer);
}

void TcpReader::run() {
  epoll_event events[kEventsAtOnce];
  uint64_t spin_until = 0;
  while (true) {
    const bool spins = spin_ns_ != 0 && now_ns() < spin_until;
    const int n = epoll_wait(epoll_.get(), events, kEventsAtOnce, spins ? 0 : -1);
    if (n <= 0) continue;
    bool any = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int i = 0; i < n; ++i) {
        if (events[i].data.fd == stop_.get()) return;
        any = connections_.serve(events[i].data.fd, 0) || any;
      }
    }
    if (any) {
      tell_();
      spin_until = now_ns() + spin_ns_;
    } else {
      nap(kStallNs);
    }
  }
}

}  // namespace afd_comm
