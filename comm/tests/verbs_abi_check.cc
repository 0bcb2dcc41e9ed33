// Compares src/verbs_abi.h with rdma-core's own header. Compiling it is the test:
//   g++ -std=c++17 -fsyntax-only -Icomm/src verbs_abi_check.cc
#include <infiniband/verbs.h>

#include "verbs_abi.h"

namespace ib = afd_comm::ib;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ib::ours) == sizeof(theirs), #ours)
#define SAME_FIELD(ours, theirs, name) \
  static_assert(offsetof(ib::ours, name) == offsetof(theirs, name), #ours "." #name)
#define SAME_VALUE(ours, theirs) \
  static_assert(static_cast<long long>(ib::ours) == static_cast<long long>(theirs), #ours)

// rdma-core 50 appended a field. The exported ibv_query_port fills no field after `flags`.
static_assert(sizeof(ib::PortAttr) <= sizeof(ibv_port_attr), "PortAttr");
SAME_FIELD(PortAttr, ibv_port_attr, port_cap_flags2);
SAME_FIELD(PortAttr, ibv_port_attr, max_msg_sz);
SAME_FIELD(PortAttr, ibv_port_attr, lid);
SAME_FIELD(PortAttr, ibv_port_attr, link_layer);
SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_qp_wr);
SAME_FIELD(DeviceAttr, ibv_device_attr, max_cqe);
SAME_FIELD(DeviceAttr, ibv_device_attr, phys_port_cnt);
SAME_SIZE(CompChannel, ibv_comp_channel);
SAME_FIELD(CompChannel, ibv_comp_channel, fd);
SAME_SIZE(Pd, ibv_pd);
SAME_SIZE(Mr, ibv_mr);
SAME_FIELD(Mr, ibv_mr, lkey);
SAME_FIELD(Mr, ibv_mr, rkey);
SAME_FIELD(Cq, ibv_cq, context);
SAME_FIELD(Cq, ibv_cq, cqe);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, cap);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME_FIELD(QpInitAttr, ibv_qp_init_attr, sq_sig_all);
SAME_FIELD(Qp, ibv_qp, context);
SAME_FIELD(Qp, ibv_qp, qp_num);
SAME_FIELD(Qp, ibv_qp, qp_type);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_FIELD(GlobalRoute, ibv_global_route, sgid_index);
SAME_FIELD(GlobalRoute, ibv_global_route, traffic_class);
SAME_SIZE(AhAttr, ibv_ah_attr);
SAME_FIELD(AhAttr, ibv_ah_attr, dlid);
SAME_FIELD(AhAttr, ibv_ah_attr, is_global);
SAME_FIELD(AhAttr, ibv_ah_attr, port_num);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, qp_access_flags);
SAME_FIELD(QpAttr, ibv_qp_attr, ah_attr);
SAME_FIELD(QpAttr, ibv_qp_attr, pkey_index);
SAME_FIELD(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME_FIELD(QpAttr, ibv_qp_attr, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME_FIELD(Sge, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME_FIELD(SendWr, ibv_send_wr, opcode);
SAME_FIELD(SendWr, ibv_send_wr, imm_data);
static_assert(offsetof(ib::SendWr, remote_addr) == offsetof(ibv_send_wr, wr.rdma.remote_addr), "");
static_assert(offsetof(ib::SendWr, rkey) == offsetof(ibv_send_wr, wr.rdma.rkey), "");
SAME_SIZE(RecvWr, ibv_recv_wr);
SAME_SIZE(Wc, ibv_wc);
SAME_FIELD(Wc, ibv_wc, opcode);
SAME_FIELD(Wc, ibv_wc, imm_data);
SAME_FIELD(Wc, ibv_wc, qp_num);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME_FIELD(ContextOps, ibv_context_ops, poll_cq);
SAME_FIELD(ContextOps, ibv_context_ops, req_notify_cq);
SAME_FIELD(ContextOps, ibv_context_ops, post_send);
SAME_FIELD(ContextOps, ibv_context_ops, post_recv);
SAME_FIELD(Context, ibv_context, ops);
SAME_FIELD(Context, ibv_context, num_comp_vectors);
static_assert(sizeof(ib::Gid) == sizeof(ibv_gid), "");

SAME_VALUE(kLinkInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(kPortDown, IBV_PORT_DOWN);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kQpInit, IBV_QPS_INIT);
SAME_VALUE(kQpRtr, IBV_QPS_RTR);
SAME_VALUE(kQpRts, IBV_QPS_RTS);
SAME_VALUE(kQpError, IBV_QPS_ERR);
SAME_VALUE(kQpTypeRc, IBV_QPT_RC);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
SAME_VALUE(kMaskState, IBV_QP_STATE);
SAME_VALUE(kMaskAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kMaskPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kMaskPort, IBV_QP_PORT);
SAME_VALUE(kMaskAv, IBV_QP_AV);
SAME_VALUE(kMaskPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kMaskTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kMaskRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kMaskRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kMaskRqPsn, IBV_QP_RQ_PSN);
SAME_VALUE(kMaskMaxQpRdAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kMaskMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kMaskSqPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kMaskMaxDestRdAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kMaskDestQpn, IBV_QP_DEST_QPN);
SAME_VALUE(kWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kInline, IBV_SEND_INLINE);
SAME_VALUE(kWcWrite, IBV_WC_RDMA_WRITE);
SAME_VALUE(kWcRecvWithImm, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kWcSuccess, IBV_WC_SUCCESS);
SAME_VALUE(kWcFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kWcRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kWcRetryExceeded, IBV_WC_RETRY_EXC_ERR);
