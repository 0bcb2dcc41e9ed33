#include "verbs_nic.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>

namespace afd_comm {
namespace {

uint64_t spin_ns(const VerbsOptions& options) {
  return options.spin_us >= 0 ? static_cast<uint64_t>(options.spin_us) * 1000 : default_spin_ns();
}

ib::Context* open_device(const Verbs& verbs, const std::string& name) {
  int count = 0;
  ib::Device** list = verbs.get_device_list(&count);
  if (list == nullptr || count == 0) {
    if (list != nullptr) verbs.free_device_list(list);
    throw CommError(
        "no RDMA device on this host; check that the NIC's driver is loaded (ls "
        "/sys/class/infiniband), that a container has /dev/infiniband, and that its device library "
        "is installed (ibverbs-providers)");
  }
  std::string known;
  ib::Context* context = nullptr;
  bool found = false;
  int error = 0;
  for (int i = 0; i < count; ++i) {
    const std::string device = verbs.get_device_name(list[i]);
    known += (known.empty() ? "" : ", ") + device;
    if (device != name) continue;
    found = true;
    context = verbs.open_device(list[i]);
    error = errno;
  }
  verbs.free_device_list(list);
  if (!found)
    throw CommError("there is no RDMA device '" + name + "' on this host; it has: " + known);
  if (context == nullptr)
    throw CommError("cannot open RDMA device " + name + ": " + errno_text(error) +
                    "; check the permissions of /dev/infiniband/uverbs*");
  return context;
}

// Returns the kernel's type of entry `index` in the port's GID table: "RoCE v2", "IB/RoCE v1" or
// "".
std::string gid_type(const std::string& device, uint8_t port, int index) {
  std::ifstream file("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) +
                     "/gid_attrs/types/" + std::to_string(index));
  std::string line;
  std::getline(file, line);
  return line;
}

bool is_zero(const ib::Gid& gid) {
  static const ib::Gid zero = {};
  return std::memcmp(gid, zero, sizeof gid) == 0;
}

bool is_ipv4(const ib::Gid& gid) {
  static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid, prefix, sizeof prefix) == 0;
}

}  // namespace

std::shared_ptr<Nic> Nic::open(const VerbsOptions& options, const std::string& device) {
  static std::mutex opening;
  static auto* open_nics = new std::map<std::string, std::weak_ptr<Nic>>;
  const uint64_t spin = spin_ns(options);
  const Verbs& verbs = load_verbs(options.library);
  const std::lock_guard<std::mutex> lock(opening);
  // Keyed by pid: a forked child has its parent's objects but none of its threads.
  std::weak_ptr<Nic>& entry = (*open_nics)[options.library + "/" + device + "/" +
                                           std::to_string(spin) + "/" + std::to_string(getpid())];
  std::shared_ptr<Nic> nic = entry.lock();
  if (nic == nullptr) {
    nic.reset(new Nic(verbs, device, spin));
    entry = nic;
  }
  return nic;
}

Nic::Nic(const Verbs& verbs, std::string name, uint64_t spin)
    : verbs_(verbs),
      name_(std::move(name)),
      context_(open_device(verbs, name_)),
      creator_(getpid()) {
  const char* failed = nullptr;
  if (verbs_.query_device(context_, &limits_) != 0) {
    failed = "query";
  } else if ((pd_ = verbs_.alloc_pd(context_)) == nullptr) {
    failed = "allocate a protection domain of";
  } else if ((channel_ = verbs_.create_comp_channel(context_)) == nullptr ||
             fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK) != 0) {
    failed = "open the event channel of";
  }
  const int error = errno;
  try {
    if (failed != nullptr)
      throw CommError(std::string("cannot ") + failed + " RDMA device " + name_ + ": " +
                      errno_text(error) + "; look at the kernel's log");
    progress_ = std::make_unique<Progress>(verbs_, channel_, name_, cpus_near(name_), spin);
  } catch (...) {
    if (channel_ != nullptr) verbs_.destroy_comp_channel(channel_);
    if (pd_ != nullptr) verbs_.dealloc_pd(pd_);
    verbs_.close_device(context_);
    throw;
  }
}

Nic::~Nic() {
  if (getpid() != creator_) {
    static_cast<void>(progress_.release());
    return;
  }
  progress_.reset();
  verbs_.destroy_comp_channel(channel_);
  verbs_.dealloc_pd(pd_);
  verbs_.close_device(context_);
}

bool Nic::active(uint8_t number) const {
  ib::PortAttr attr{};
  return verbs_.query_port(context_, number, &attr) == 0 && attr.state == ib::kPortActive;
}

PortFacts Nic::port(uint8_t number, int gid_index) const {
  PortFacts facts;
  facts.number = number;
  facts.name = name_ + ":" + std::to_string(number);
  ib::PortAttr attr{};
  if (verbs_.query_port(context_, number, &attr) != 0)
    throw CommError("RDMA device " + name_ + " has no port " + std::to_string(number) +
                    "; ports are counted from 1");
  facts.active = attr.state == ib::kPortActive;
  facts.link_layer = attr.link_layer;
  facts.mtu = static_cast<uint8_t>(attr.active_mtu);
  facts.lid = attr.lid;
  facts.max_message = attr.max_msg_sz != 0 ? attr.max_msg_sz : 1u << 30;
  const bool infiniband = attr.link_layer == ib::kLinkInfiniBand;
  int chosen = gid_index;
  if (chosen < 0 && infiniband) chosen = 0;
  if (chosen < 0) {
    // Prefer IPv4 addresses: they are routed like the host's other traffic.
    for (int i = 0; i < attr.gid_tbl_len; ++i) {
      ib::Gid gid = {};
      if (verbs_.query_gid(context_, number, i, &gid) != 0 || is_zero(gid)) continue;
      if (gid_type(name_, number, i) == "IB/RoCE v1") continue;
      if (chosen < 0 || is_ipv4(gid)) chosen = i;
      if (is_ipv4(gid)) break;
    }
  }
  if (chosen < 0)
    throw CommError("port " + facts.name +
                    " has no RoCE v2 address; give its network interface an IP address and bring "
                    "it up (ip addr, ip link)");
  facts.gid_index = chosen;
  if (verbs_.query_gid(context_, number, chosen, &facts.gid) != 0 ||
      (!infiniband && is_zero(facts.gid)))
    throw CommError("port " + facts.name + " has no address at gid_index " +
                    std::to_string(chosen) +
                    "; `afd doctor` lists its addresses, -1 chooses the first RoCE v2 one");
  return facts;
}

CompletionQueue::CompletionQueue(std::shared_ptr<Nic> nic, int entries, CompletionSink* sink)
    : nic_(std::move(nic)) {
  const int wanted = std::min(entries, nic_->max_cqe());
  cq_ = nic_->verbs().create_cq(nic_->context(), wanted, nullptr, nic_->channel(), 0);
  if (cq_ == nullptr)
    throw CommError("cannot create a completion queue of " + std::to_string(wanted) +
                    " entries on " + nic_->name() + ": " + errno_text(errno) +
                    "; close other users of the device or raise ulimit -l");
  nic_->progress().add(cq_, sink);
  attached_ = true;
}

CompletionQueue::~CompletionQueue() {
  detach();
  nic_->verbs().destroy_cq(cq_);
}

void CompletionQueue::detach() {
  if (attached_) nic_->progress().remove(cq_);
  attached_ = false;
}

}  // namespace afd_comm
