#include "verbs_qp.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace afd_comm {
namespace {

// Large enough for a record or a small payload.
constexpr uint32_t kWantedInline = 256;
constexpr uint8_t kRnrTimer = 12;   // 0.64 ms until a sender tries again when no receive is posted
constexpr uint8_t kRnrForEver = 7;  // a stopped peer is not dead: the caller's deadline decides
constexpr uint8_t kHopLimit = 64;
constexpr uint32_t kPsnMask = 0xffffff;

uint32_t random_psn() {
  // Random, so that a stray packet of an earlier connection is not accepted by this one.
  uint32_t psn = 0;
  static_cast<void>(!getrandom(&psn, sizeof psn, 0));
  return psn & kPsnMask;
}

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Nic> nic, const PortFacts& port, const CompletionQueue& cq,
                     QpDepth depth)
    : nic_(std::move(nic)), port_(port), psn_(random_psn()) {
  // The limit for inline data differs by device, and not all devices report it.
  for (uint32_t wanted = kWantedInline; qp_ == nullptr; wanted /= 2) {
    ib::QpInitAttr init{};
    init.send_cq = init.recv_cq = cq.get();
    init.qp_type = ib::kQpTypeRc;
    init.cap = {depth.send, depth.recv, 1, 1, wanted};
    qp_ = nic_->verbs().create_qp(nic_->pd(), &init);
    if (qp_ != nullptr) max_inline_ = init.cap.max_inline_data;
    if (qp_ == nullptr && wanted < sizeof(uint64_t))
      throw CommError("cannot create a queue pair on " + nic_->name() + ": " + errno_text(errno) +
                      "; lower transport.verbs.qps_per_port, close other users of the device, or "
                      "raise ulimit -l");
  }
  ib::QpAttr attr{};
  attr.qp_state = ib::kQpInit;
  attr.port_num = port_.number;
  attr.qp_access_flags = ib::kRemoteWrite;
  const int error = nic_->verbs().modify_qp(
      qp_, &attr, ib::kMaskState | ib::kMaskPkeyIndex | ib::kMaskPort | ib::kMaskAccess);
  if (error == 0) return;
  nic_->verbs().destroy_qp(qp_);
  throw CommError("cannot set up a queue pair on port " + port_.name + ": " + errno_text(error) +
                  "; check the port's partition key and state (ibv_devinfo)");
}

QueuePair::~QueuePair() { nic_->verbs().destroy_qp(qp_); }

WireQp QueuePair::half() const {
  WireQp half{};
  half.qpn = qp_->qp_num;
  half.psn = psn_;
  std::memcpy(half.gid, port_.gid, sizeof half.gid);
  half.lid = port_.lid;
  half.mtu = port_.mtu;
  return half;
}

void QueuePair::connect(const WireQp& peer, const std::string& peer_port,
                        const VerbsOptions& options) {
  ib::QpAttr attr{};
  attr.qp_state = ib::kQpRtr;
  attr.path_mtu = std::min(port_.mtu, peer.mtu);
  attr.dest_qp_num = peer.qpn;
  attr.rq_psn = peer.psn & kPsnMask;
  attr.min_rnr_timer = kRnrTimer;
  attr.ah_attr.port_num = port_.number;
  attr.ah_attr.sl = static_cast<uint8_t>(options.service_level);
  attr.ah_attr.dlid = peer.lid;
  // RoCE has global addresses only; InfiniBand uses local addresses within a subnet.
  attr.ah_attr.is_global = port_.link_layer != ib::kLinkInfiniBand;
  std::memcpy(attr.ah_attr.grh.dgid, peer.gid, sizeof peer.gid);
  attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(port_.gid_index);
  attr.ah_attr.grh.hop_limit = kHopLimit;
  attr.ah_attr.grh.traffic_class = static_cast<uint8_t>(options.traffic_class);
  int error =
      nic_->verbs().modify_qp(qp_, &attr,
                              ib::kMaskState | ib::kMaskAv | ib::kMaskPathMtu | ib::kMaskDestQpn |
                                  ib::kMaskRqPsn | ib::kMaskMaxDestRdAtomic | ib::kMaskMinRnrTimer);
  if (error == 0) {
    ib::QpAttr send{};
    send.qp_state = ib::kQpRts;
    send.timeout = static_cast<uint8_t>(options.timeout);
    send.retry_cnt = static_cast<uint8_t>(options.retry);
    send.rnr_retry = kRnrForEver;
    send.sq_psn = psn_;
    error =
        nic_->verbs().modify_qp(qp_, &send,
                                ib::kMaskState | ib::kMaskTimeout | ib::kMaskRetryCount |
                                    ib::kMaskRnrRetry | ib::kMaskSqPsn | ib::kMaskMaxQpRdAtomic);
  }
  if (error != 0)
    throw CommError("cannot connect port " + port_.name + " with the peer's " + peer_port + ": " +
                    errno_text(error) +
                    "; check that the peer's address can be reached from this port (ip route get, "
                    "ip neigh) and that gid_index names an address of the same kind on both sides");
}

void QueuePair::fail() {
  ib::QpAttr attr{};
  attr.qp_state = ib::kQpError;
  nic_->verbs().modify_qp(qp_, &attr, ib::kMaskState);
}

bool QueuePair::post_send(ib::SendWr* first) {
  ib::SendWr* bad = nullptr;
  return nic_->verbs().post_send(qp_, first, &bad) == 0;
}

bool QueuePair::post_recv(uint64_t wr_id) {
  ib::RecvWr wr{};
  wr.wr_id = wr_id;
  ib::RecvWr* bad = nullptr;
  return nic_->verbs().post_recv(qp_, &wr, &bad) == 0;
}

}  // namespace afd_comm
