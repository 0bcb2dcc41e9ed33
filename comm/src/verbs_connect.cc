// Backend verbs, sender: set-up.
#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "backends.h"
#include "proxy_link.h"
#include "verbs_link.h"
#include "verbs_receiver.h"

namespace afd_comm {
namespace {

constexpr uint32_t kMaxSendDepth = 2048;
constexpr uint64_t kTestSliceNs = 50000000;

const char* kind(uint8_t link_layer) {
  return link_layer == ib::kLinkInfiniBand ? "InfiniBand" : "Ethernet (RoCE)";
}

// Returns why these two ports cannot be connected, or an empty string.
std::string obstacle(const PortFacts& ours, const WirePort& theirs) {
  const std::string pair = ours.name + " and the peer's " + theirs.name;
  if (!ours.active)
    return "port " + ours.name + " is down; check its cable and interface (ip link, rdma link)";
  if (!theirs.active)
    return std::string("the peer's port ") + theirs.name +
           " is down; check its cable and interface there";
  if (ours.link_layer != theirs.link_layer)
    return pair + " are of different kinds, " + kind(ours.link_layer) + " and " +
           kind(theirs.link_layer) + "; list the ports of both ends in the same order";
  // The first half of an InfiniBand GID is the subnet's.
  if (ours.link_layer == ib::kLinkInfiniBand && std::memcmp(ours.gid, theirs.gid, 8) != 0)
    return pair +
           " are in different InfiniBand subnets; list the ports of both ends in the same order";
  return {};
}

void add_note(std::string& notes, const std::string& note) {
  notes += (notes.empty() ? "" : "; ") + note;
}

template <typename Frame>
void send_frame(const Fd& fd, const Frame& frame, const TcpAddress& to) {
  // A new socket's buffer always has room for these few bytes.
  if (send(fd.get(), &frame, sizeof frame, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof frame))
    throw CommError("cannot talk to the region at " + place(to) + ": " + errno_text(errno) +
                    "; is it shutting down?");
}

}  // namespace

VerbsLink::VerbsLink(const TcpAddress& address, const LinkOptions& options)
    : DrivenLink(options.trace),
      options_(options),
      creator_(getpid()),
      least_stripe_(options.verbs->stripe_bytes),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_)
    throw CommError("cannot open an eventfd: " + errno_text(errno) +
                    "; raise the open-files limit");
  const uint64_t deadline = deadline_after_us(options_.timeout_us);
  open_ports(*options_.verbs);
  fd_ = connect_until(address, deadline, options_.interrupt);
  const VerbsWelcome welcome = greet(address, deadline);
  try {
    make_paths(*options_.verbs, welcome);
    exchange(address, deadline);
    make_bounce();
    test_device();
    test_paths(deadline);
    control_ = std::thread([this] { run_control(); });
  } catch (...) {
    // The constructor failed, so no destructor runs: stop the progress threads here.
    for (const auto& queue : queues_) queue->detach();
    if (bounce_ != nullptr) {
      sources_.clear();
      munmap(bounce_, bounce_bytes_);
    }
    throw;
  }
}

void VerbsLink::open_ports(const VerbsOptions& options) {
  for (const std::string& text : options.ports) {
    const PortName name = parse_port(text);
    const auto known = std::find_if(nics_.begin(), nics_.end(), [&name](const auto& nic) {
      return nic->name() == name.device;
    });
    port_nic_.push_back(static_cast<std::size_t>(known - nics_.begin()));
    if (known == nics_.end()) nics_.push_back(Nic::open(options, name.device));
    ports_.push_back(nics_[port_nic_.back()]->port(name.number, options.gid_index));
  }
}

VerbsWelcome VerbsLink::greet(const TcpAddress& to, uint64_t deadline) {
  VerbsHello hello{kVerbsHelloMagic, kVerbsVersion, {}, options_.slots.first, options_.slots.count};
  std::memcpy(hello.token, to.token.data(), to.token.size());
  send_frame(fd_, hello, to);
  VerbsWelcome welcome{};
  receive_all(fd_, &welcome, sizeof welcome, deadline, to, options_.interrupt);
  if (welcome.magic != kVerbsWelcomeMagic)
    throw CommError("the service at " + place(to) + " is not a region; check the address");
  if (welcome.version != kVerbsVersion)
    throw CommError("the region at " + place(to) + " uses verbs protocol version " +
                    std::to_string(welcome.version) + ", but this library uses " +
                    std::to_string(kVerbsVersion) + "; install the same afd_comm on both sides");
  if (welcome.status != static_cast<int32_t>(Status::Ok))
    throw CommError("the region at " + place(to) + " refused: " + get_reason(welcome.reason));
  region_slots_ = welcome.slots;
  slot_bytes_ = welcome.slot_bytes;
  stride_ = welcome.stride;
  payloads_ = std::max(welcome.payloads, 1u);
  if (welcome.port_count == 0 || welcome.port_count > kMaxVerbsPorts)
    throw CommError("the region at " + place(to) + " named no ports; check its configuration");
  const uint32_t count = options_.slots.count != 0 ? options_.slots.count : region_slots_;
  if (count > kMaxImmediateSlots)
    throw CommError("a verbs link covers at most " + std::to_string(kMaxImmediateSlots) +
                    " slots, not " + std::to_string(count) + "; claim fewer with slots=");
  first_ = options_.slots.first;
  out_ = std::vector<Outgoing>(count);
  return welcome;
}

void VerbsLink::make_paths(const VerbsOptions& options, const VerbsWelcome& welcome) {
  most_piece_ = uint64_t{1} << 30;
  for (const PortFacts& port : ports_)
    most_piece_ = std::min<uint64_t>(most_piece_, port.max_message);
  const uint64_t per_message = kMaxParts + slot_bytes_ / most_piece_ + 1;
  if (per_message >= kMaxPieces)
    throw CommError("slots of " + std::to_string(slot_bytes_) + " bytes are too large for " +
                    ports_[0].name + ", which sends at most " + std::to_string(most_piece_) +
                    " bytes at a time; lower the slot capacity");
  const std::size_t pairs = std::max<std::size_t>(ports_.size(), welcome.port_count);
  const std::size_t wanted = pairs * static_cast<std::size_t>(options.qps_per_port);
  if (wanted > kMaxVerbsQps)
    throw CommError("verbs: " + std::to_string(pairs) + " pairs of ports with qps_per_port " +
                    std::to_string(options.qps_per_port) + " make " + std::to_string(wanted) +
                    " queue pairs; at most " + std::to_string(kMaxVerbsQps) + " are possible");
  // Room for every stripe of every slot, in case all other paths failed.
  const uint64_t depth = out_.size() * (per_message + 2 * kMaxStripes);
  std::vector<int> entries(nics_.size(), 0);
  struct Wanted {
    std::size_t local, remote;
    uint32_t depth;
  };
  std::vector<Wanted> plan;
  // Adjacent paths use different ports, so that two stripes use two ports.
  for (std::size_t i = 0; i < wanted; ++i) {
    const std::size_t local = i % pairs % ports_.size(), remote = i % pairs % welcome.port_count;
    const std::string why = obstacle(ports_[local], welcome.ports[remote]);
    if (!why.empty()) {
      if (i < pairs) add_note(notes_, why);
      continue;
    }
    const Nic& nic = *nics_[port_nic_[local]];
    const auto here = static_cast<uint32_t>(std::min<uint64_t>(
        {depth, kMaxSendDepth, static_cast<uint64_t>(std::max(nic.max_qp_wr(), 1))}));
    plan.push_back({local, remote, here});
    entries[port_nic_[local]] += static_cast<int>(here);
  }
  if (plan.empty()) throw CommError("no pair of ports can be connected: " + notes_);
  for (std::size_t i = 0; i < nics_.size(); ++i)
    queues_.push_back(std::make_unique<CompletionQueue>(nics_[i], std::max(entries[i], 1),
                                                        static_cast<CompletionSink*>(this)));
  for (const Wanted& one : plan) {
    auto path = std::make_unique<Path>();
    path->nic = port_nic_[one.local];
    path->peer_port = welcome.ports[one.remote].name;
    path->room = static_cast<int32_t>(one.depth);
    path->qp = std::make_unique<QueuePair>(nics_[path->nic], ports_[one.local], *queues_[path->nic],
                                           QpDepth{one.depth, 1});
    path->remote_port = static_cast<uint8_t>(one.remote);
    paths_.push_back(std::move(path));
  }
}

void VerbsLink::exchange(const TcpAddress& to, uint64_t deadline) {
  VerbsConnect connect{};
  connect.magic = kVerbsConnectMagic;
  connect.count = static_cast<uint32_t>(paths_.size());
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    connect.qps[i] = paths_[i]->qp->half();
    connect.qps[i].port = paths_[i]->remote_port;
  }
  send_frame(fd_, connect, to);
  VerbsAccept accept{};
  receive_all(fd_, &accept, sizeof accept, deadline, to, options_.interrupt);
  if (accept.magic != kVerbsAcceptMagic)
    throw CommError("the service at " + place(to) + " is not a region; check the address");
  if (accept.status != static_cast<int32_t>(Status::Ok))
    throw CommError("the region at " + place(to) +
                    " could not connect: " + get_reason(accept.reason));
  remote_payload_ = accept.payload;
  remote_records_ = accept.records;
  remote_staged_ = accept.staged != 0;
  if (remote_staged_)
    add_note(notes_, "the receiver's NICs cannot write its device's memory, so it copies messages");
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    Path& path = *paths_[i];
    path.payload_rkey = accept.qps[i].payload_rkey;
    path.records_rkey = accept.qps[i].records_rkey;
    std::string why;
    try {
      if (accept.qps[i].refused == 0)
        path.qp->connect(accept.qps[i], path.peer_port, *options_.verbs);
      else
        why = "the region says: " + get_reason(accept.reason);
    } catch (const CommError& error) {
      why = error.what();
    }
    if (why.empty()) continue;
    path.error = ib::kWcFlushed;  // neither tested nor used
    if (notes_.find(why) == std::string::npos) add_note(notes_, why);
  }
}

std::shared_ptr<const VerbsSource> VerbsLink::make_source(void* address, uint64_t nbytes,
                                                          Device device, uint64_t id) {
  auto source = std::make_shared<VerbsSource>();
  source->id = id;
  source->begin = static_cast<const uint8_t*>(address);
  source->nbytes = nbytes;
  source->host = device.is_cpu();
  for (const auto& nic : nics_)
    source->keys.emplace_back(nic, address, nbytes, ib::kLocalWrite, device);
  return source;
}

void VerbsLink::make_bounce() {
  copies_ = round_up(out_.size() * kRecordStride, kPage);
  bounce_bytes_ = round_up(copies_ + std::max<uint64_t>(out_.size() * stride_, kTestBytes), kPage);
  void* memory =
      mmap(nullptr, bounce_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw CommError("cannot allocate the " + std::to_string(bounce_bytes_) +
                    " bytes of a link's send buffer: " + errno_text(errno) +
                    "; free memory or claim fewer slots");
  bounce_ = static_cast<uint8_t*>(memory);
  sources_.push_back(make_source(bounce_, bounce_bytes_, Device{}, 0));
  source_lists_.push_back(std::make_unique<const SourceList>());
  current_sources_.store(source_lists_.back().get(), std::memory_order_release);
}

// Whether the NICs can read the device's memory is a matter of drivers, not of this memory.
void VerbsLink::test_device() {
  if (options_.device.is_cpu()) return;
  for (const auto& nic : nics_) {
    const std::string why = nic->refuses(options_.device);
    if (why.empty()) continue;
    staged_ = true;
    add_note(notes_, why + "; messages are copied through host memory");
    return;
  }
}

// Sends one packet of the path's MTU over every path, so that a broken path fails here, with a
// clear message, and not on the hot path.
void VerbsLink::test_paths(uint64_t deadline) {
  alive_.store(all_stripes(static_cast<uint32_t>(paths_.size())), std::memory_order_release);
  for (uint32_t i = 0; i < paths_.size(); ++i) {
    Path& path = *paths_[i];
    if (path.error.load() != 0) continue;
    ib::Sge sge{reinterpret_cast<uintptr_t>(bounce_ + copies_), kTestBytes,
                sources_[0]->keys[path.nic].lkey()};
    ib::SendWr request{};
    request.wr_id = verbs_test_id(i);
    request.sg_list = &sge;
    request.num_sge = 1;
    request.opcode = ib::kWriteWithImm;
    request.send_flags = ib::kSignaled;
    request.imm_data = htonl(encode(Immediate{0, 0, kProbeStripe}));
    request.remote_addr = remote_records_ + out_.size() * kRecordStride;
    request.rkey = path.records_rkey;
    if (!path.qp->post_send(&request)) fail_path(i, ib::kWcFlushed);
  }
  const auto open = [this] {
    return std::any_of(paths_.begin(), paths_.end(), [](const auto& path) {
      return !path->tested.load() && path->error.load() == 0;
    });
  };
  while (open() && now_ns() < deadline) {
    const EventCount::Waiter waiter(progress_);
    if (!open()) break;
    waiter.sleep(kTestSliceNs);
    if (options_.interrupt != nullptr && options_.interrupt())
      throw CommError("connecting was interrupted");
  }
  const Verbs& verbs = nics_[0]->verbs();
  std::string failures;
  for (uint32_t i = 0; i < paths_.size(); ++i) {
    Path& path = *paths_[i];
    if (path.tested.load(std::memory_order_acquire)) continue;
    const bool connected = path.error.load() != ib::kWcFlushed;
    fail_path(i, ib::kWcRetryExceeded);
    if (connected)
      add_note(failures, path.qp->port().name + " cannot reach the peer's " + path.peer_port +
                             " (" + verbs.wc_status_str(path.error.load()) + ")");
  }
  if (!failures.empty())
    add_note(notes_, failures +
                         "; check that both are on one network (list ports in the same order on "
                         "both ends), the MTU along the way, and lossless settings (PFC)");
  if (alive_.load(std::memory_order_acquire) == 0)
    throw CommError("no path to the peer works: " + notes_);
}

namespace {

std::unique_ptr<Link> open_link_verbs(const std::string& address, const LinkOptions& options) {
  if (!options.verbs)
    throw CommError(
        "the link was given no verbs options; name this host's ports (transport.verbs.ports)");
  check_options(*options.verbs);
  return std::make_unique<ProxyLink>(
      std::make_unique<VerbsLink>(parse_tcp(address, "verbs"), options), options);
}

}  // namespace

const Backend verbs_backend{"verbs", true, open_link_verbs, open_verbs_receiver};

}  // namespace afd_comm
