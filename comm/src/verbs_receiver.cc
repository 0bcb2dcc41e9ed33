// Backend verbs, receiver: the control thread that accepts senders and closes failed paths. The
// NICs' progress threads handle the messages.
#include "verbs_receiver.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "socket.h"
#include "verbs_connection.h"

namespace afd_comm {
namespace {

// Longest time until a connection notices that a newer writer of another backend has its slots.
constexpr int kLookMs = 100;

class VerbsReceiver final : public Receiver {
 public:
  VerbsReceiver(const Memory& memory, const Token& token, Device device,
                const VerbsOptions& options)
      : token_(token),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        host_{memory, token_, -1, options, {}, {}, {}, {}, {}, {}, false, wake_.get()} {
    open_ports(device);
    SocketAddress bound;
    listener_ = listen_on(options.host, options.port, bound, "verbs host");
    address_.scheme = "verbs";
    address_.host = host_of(bound);
    address_.port = port_of(bound);
    address_.token = token;
    // A separate open file description, so that the lock also excludes links of this process.
    const std::string self = "/proc/self/fd/" + std::to_string(memory.fd().get());
    claim_lock_ = Fd(open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!wake_ || !claim_lock_)
      throw CommError("cannot open the descriptors of a verbs receiver: " + errno_text(errno) +
                      "; raise the open-files limit");
    host_.claim_lock_fd = claim_lock_.get();
    start();
  }

  ~VerbsReceiver() override { stop(); }

  std::string address() const override { return format(address_); }

  void stop() override {
    if (!thread_.joinable()) return;
    stop_.store(true, std::memory_order_release);
    const uint64_t one = 1;
    static_cast<void>(!write(wake_.get(), &one, sizeof one));
    thread_.join();
    connections_.clear();
    listener_.reset();
  }

 private:
  void open_ports(Device device) {
    for (const std::string& text : host_.options.ports) {
      const PortName name = parse_port(text);
      const auto known =
          std::find_if(host_.nics.begin(), host_.nics.end(),
                       [&name](const auto& nic) { return nic->name() == name.device; });
      host_.port_nic.push_back(static_cast<std::size_t>(known - host_.nics.begin()));
      host_.ports.push_back(name);
      if (known == host_.nics.end()) host_.nics.push_back(Nic::open(host_.options, name.device));
      // Report the error now, not to the first sender.
      host_.nics[host_.port_nic.back()]->port(name.number, host_.options.gid_index);
    }
    if (!device.is_cpu()) host_.accelerator = open_accelerator(device);
    if (!device.is_cpu() && !write_into_device(device))
      host_.staged =
          std::make_unique<StageBuffer>(host_.accelerator, host_.memory.geometry().payload_bytes());
    if (host_.payload.empty())
      open_payload(host_.staged ? host_.staged->host() : host_.memory.payload(0), Device{});
  }

  // Lets the NICs write into the device's memory. Returns false if they cannot.
  bool write_into_device(Device device) {
    const RemoteWrites order = host_.accelerator->remote_writes();
    if (order == RemoteWrites::Unordered) return false;
    host_.flush = order == RemoteWrites::Flushed;
    try {
      open_payload(host_.memory.payload(0), device);
      return true;
    } catch (const CommError&) {
      host_.payload.clear();
      host_.flush = false;
      return false;
    }
  }

  void open_payload(void* payload, Device device) {
    for (const auto& nic : host_.nics)
      host_.payload.emplace_back(nic, payload, host_.memory.geometry().payload_bytes(),
                                 ib::kLocalWrite | ib::kRemoteWrite, device);
  }

  void start() {
    thread_ = start_thread("afd-verbs", [this] { run(); });
  }

  void run() {
    std::vector<pollfd> fds;
    while (!stop_.load(std::memory_order_acquire)) {
      fds.assign({{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}});
      for (const auto& connection : connections_) fds.push_back({connection->fd(), POLLIN, 0});
      poll(fds.data(), fds.size(), connections_.empty() ? -1 : kLookMs);
      uint64_t count = 0;
      if (fds[0].revents != 0) static_cast<void>(!read(wake_.get(), &count, sizeof count));
      // In the order of arrival: if two claim the same slots, the newer one gets them.
      for (std::size_t i = 2; i < fds.size(); ++i)
        if (fds[i].revents != 0) serve(fds[i].fd);
      drop_if([](VerbsConnection& c) { return c.needs_drop(); });
      const uint64_t now = now_ns();
      drop_if([now](const VerbsConnection& c) {
        return !c.greeted() && now - c.accepted_ns() > kGreetNs;
      });
      if (fds[1].revents != 0) accept_all();
    }
  }

  void accept_all() {
    while (Fd fd = accept_connection(listener_)) {
      if (connections_.size() >= kMaxConnections) continue;
      tune(fd.get());
      connections_.push_back(std::make_unique<VerbsConnection>(std::move(fd), host_));
      // Too many connections without a greeting: drop the oldest.
      const auto ungreeted = std::count_if(connections_.begin(), connections_.end(),
                                           [](const auto& c) { return !c->greeted(); });
      if (static_cast<std::size_t>(ungreeted) <= kMaxUngreeted) continue;
      connections_.erase(std::find_if(connections_.begin(), connections_.end(),
                                      [](const auto& c) { return !c->greeted(); }));
    }
  }

  void serve(int fd) {
    const auto found = std::find_if(connections_.begin(), connections_.end(),
                                    [fd](const auto& c) { return c->fd() == fd; });
    if (found == connections_.end()) return;  // dropped in favour of a newer one
    VerbsConnection& connection = **found;
    const bool greeted = connection.greeted();
    const bool keep = connection.on_readable();
    const SlotRange slots = connection.slots();
    const VerbsConnection* newcomer = keep ? &connection : nullptr;
    if (!keep) connections_.erase(found);
    if (greeted || newcomer == nullptr) return;
    // Another connection had these slots and must write nothing from now on. The new connection
    // waits for the reply to its next frame, which is sent after this.
    drop_if([newcomer, slots](const VerbsConnection& other) {
      if (&other == newcomer || !other.greeted() || !other.slots().overlaps(slots)) return false;
      other.say_farewell(Status::Closed);
      return true;
    });
  }

  template <typename Test>
  void drop_if(Test test) {
    for (auto& connection : connections_)
      if (test(*connection)) connection.reset();
    connections_.erase(std::remove(connections_.begin(), connections_.end(), nullptr),
                       connections_.end());
  }

  Token token_;
  Fd wake_;
  Fd claim_lock_;
  Fd listener_;
  TcpAddress address_;
  VerbsHost host_;
  std::vector<std::unique_ptr<VerbsConnection>> connections_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Receiver> open_verbs_receiver(const Memory& memory, const Token& token,
                                              const RegionOptions& options) {
  if (!options.verbs) return nullptr;
  check_options(*options.verbs);
  return std::make_unique<VerbsReceiver>(memory, token, options.device, *options.verbs);
}

}  // namespace afd_comm
