// The part of libibverbs.so.1's binary interface that this backend uses.
//
// Declared here so that a build needs no RDMA headers and the library is found at run time. The
// layouts are the ABI "IBVERBS_1.1", unchanged in all versions of rdma-core. If its headers are
// installed, tests/verbs_abi_check.cc compares every size, offset and value with them at build
// time. Names follow libibverbs' ibv_*.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace afd_comm::ib {

struct Device;  // opaque
struct Srq;     // unused
struct Context;

using Gid = uint8_t[16];

enum LinkLayer : uint8_t { kLinkUnspecified = 0, kLinkInfiniBand = 1, kLinkEthernet = 2 };
enum PortState : int { kPortDown = 1, kPortInit = 2, kPortArmed = 3, kPortActive = 4 };
enum QpState : int { kQpReset = 0, kQpInit = 1, kQpRtr = 2, kQpRts = 3, kQpError = 6 };
constexpr int kQpTypeRc = 2;

enum Access : unsigned {
  kLocalWrite = 1,
  kRemoteWrite = 2,
  kRelaxedOrdering = 1u << 20,  // optional: older kernels ignore it
};

enum QpAttrMask : int {
  kMaskState = 1 << 0,
  kMaskAccess = 1 << 3,
  kMaskPkeyIndex = 1 << 4,
  kMaskPort = 1 << 5,
  kMaskAv = 1 << 7,
  kMaskPathMtu = 1 << 8,
  kMaskTimeout = 1 << 9,
  kMaskRetryCount = 1 << 10,
  kMaskRnrRetry = 1 << 11,
  kMaskRqPsn = 1 << 12,
  kMaskMaxQpRdAtomic = 1 << 13,
  kMaskMinRnrTimer = 1 << 15,
  kMaskSqPsn = 1 << 16,
  kMaskMaxDestRdAtomic = 1 << 17,
  kMaskDestQpn = 1 << 20,
};

enum WrOpcode : int { kWrite = 0, kWriteWithImm = 1 };
enum SendFlags : unsigned { kSignaled = 2, kInline = 8 };
enum WcOpcode : int { kWcWrite = 1, kWcRecvWithImm = 129 };
enum WcStatus : int {
  kWcSuccess = 0,
  kWcFlushed = 5,
  kWcRemoteAccess = 10,
  kWcRetryExceeded = 12,
};

struct PortAttr {
  int state;
  int max_mtu;
  int active_mtu;  // 1: 256 bytes ... 5: 4096
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t bad_pkey_cntr;
  uint32_t qkey_viol_cntr;
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t sm_lid;
  uint8_t lmc;
  uint8_t max_vl_num;
  uint8_t sm_sl;
  uint8_t subnet_timeout;
  uint8_t init_type_reply;
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid;
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int rest[22];  // limits that this backend never reaches
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};

struct Pd {
  Context* context;
  uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  std::size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;  // the following fields belong to the library
};

struct QpCap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type;
  int sq_sig_all;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  int state;
  int qp_type;  // the following fields belong to the library
};

struct GlobalRoute {
  alignas(8) Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct QpAttr {
  int qp_state;
  int cur_qp_state;
  int path_mtu;
  int path_mig_state;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t en_sqd_async_notify;
  uint8_t sq_draining;
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};

struct Sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;  // network byte order
  uint64_t remote_addr;
  uint32_t rkey;
  uint64_t rest[9];  // other opcodes
};

struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

struct Wc {
  uint64_t wr_id;
  int status;
  int opcode;  // undefined unless status is success
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;  // network byte order
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};

// The fast path of libibverbs consists of inline functions that call through this table.
struct ContextOps {
  void* before_poll[11];
  int (*poll_cq)(Cq*, int, Wc*);
  int (*req_notify_cq)(Cq*, int solicited_only);
  void* between[12];
  int (*post_send)(Qp*, SendWr*, SendWr** bad);
  int (*post_recv)(Qp*, RecvWr*, RecvWr** bad);
  void* after_post[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;  // the following fields belong to the library
};

}  // namespace afd_comm::ib
