// One phase of a piece on a lane, in one call and without Python: encode, send, receive, decode.
//
// The operations are a list that is made once (src/gradwire/collectives/operations.py). A lane has one TCP connection to each
// other rank. Messages of a pair of ranks travel in the order of the lists, which is the same on both. A message begins with a
// header, so that ranks that run different lists fail instead of adding the wrong numbers, and with a checksum, which is
// compared before anything uses the message.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <ctime>
#include <deque>
#include <vector>

#include "checksum.hpp"
#include "packed.hpp"

namespace gradwire {
namespace {

enum Kind : int64_t { kCall, kSend, kReceive, kFlush };

// Twin of `Operation` in src/gradwire/collectives/operations.py.
struct Operation {
  int64_t kind;
  int64_t peer;           // of a message: whose connection
  void* target;           // of a call the function in its packed form, of a message the first byte
  int64_t arguments[10];  // of a call its arguments, of a message the number of bytes and a tag
};

// Twin of `Outcome` in src/gradwire/collectives/operations.py.
struct Outcome {
  int64_t operation;     // the one that failed
  int64_t peer;          // whose connection failed; -1 where a call refused its arguments
  int64_t damaged;       // whether bytes of that peer were changed on the way
  double codec_seconds;  // of this thread, in calls
  char words[256];
};

struct Header {
  uint64_t bytes;
  uint32_t tag;
  uint32_t checksum;
};

// Bytes that come before poll wakes the thread; less where less is left of the message.
constexpr int kWakeBytes = 1 << 18;

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// A message under way: its header, then its bytes.
struct Message {
  Header header;
  char* bytes;
  uint64_t done = 0;      // bytes of header and message
  uint32_t checksum = 0;  // of what arrived
  uint64_t expected_bytes;
  uint32_t expected_tag;

  uint64_t total() const { return sizeof header + expected_bytes; }
  bool complete() const { return done == total(); }
  uint64_t arrived() const { return done < sizeof header ? 0 : done - sizeof header; }  // without the header

  // What is left, for sendmsg and recvmsg.
  int parts(iovec* into) {
    int count = 0;
    if (done < sizeof header) into[count++] = {reinterpret_cast<char*>(&header) + done, sizeof header - done};
    const uint64_t at = arrived();
    if (at < expected_bytes) into[count++] = {bytes + at, expected_bytes - at};
    return count;
  }
};

// The connection to another rank.
struct Peer {
  int fd = -1;
  int wakes_at = 0;
  std::deque<Message> sending, receiving;  // in order; what is complete leaves the front

  bool idle() const { return sending.empty() && receiving.empty(); }
};

struct Failed {
  int64_t peer;
  bool damaged;
  char words[200];
};

[[noreturn]] __attribute__((format(printf, 3, 4))) void fail(int64_t peer, bool damaged, const char* format, ...) {
  Failed failed{peer, damaged, {}};
  va_list values;
  va_start(values, format);
  std::vsnprintf(failed.words, sizeof failed.words, format, values);
  va_end(values);
  throw failed;
}

class Phase {
 public:
  Phase(const int64_t* fds, int64_t ranks, double timeout_s) : peers_(size_t(ranks)), timeout_s_(timeout_s) {
    for (int64_t rank = 0; rank < ranks; ++rank) peers_[size_t(rank)].fd = int(fds[rank]);
    polled_.reserve(size_t(ranks));
    ranks_.reserve(size_t(ranks));
  }

  void expect(const Operation& operation) { peer_of(operation).receiving.push_back(message_of(operation)); }

  void send(const Operation& operation) {
    Peer& peer = peer_of(operation);
    Message message = message_of(operation);
    if (message.bytes != summed_.payload || message.expected_bytes != summed_.count)
      summed_ = {message.bytes, message.expected_bytes, crc32c(0, message.bytes, message.expected_bytes)};
    message.header.checksum = summed_.checksum;
    peer.sending.push_back(message);
    push(peer, operation.peer);
  }

  // A call may have changed what was sent before. `encoded` is what it encoded, if it summed that on its way.
  void called(const Encoded& encoded) { summed_ = encoded; }

  // Until the first message of this peer that is not complete was `left` before.
  void receive(const Operation& operation, size_t left) {
    Peer& peer = peer_of(operation);
    pull(peer, operation.peer);
    wait(operation.peer, "a message", [&] { return peer.receiving.size() <= left; });
  }

  void flush() {
    for (size_t rank = 0; rank < peers_.size(); ++rank)
      wait(int64_t(rank), "room for a message", [&] { return peers_[rank].sending.empty(); });
  }

 private:
  Peer& peer_of(const Operation& operation) { return peers_[size_t(operation.peer)]; }

  static Message message_of(const Operation& operation) {
    Message message;
    message.expected_bytes = uint64_t(operation.arguments[0]);
    message.expected_tag = uint32_t(operation.arguments[1]);
    message.header = {message.expected_bytes, message.expected_tag, 0};
    message.bytes = static_cast<char*>(operation.target);
    return message;
  }

  // Sends as much as fits into the connection.
  void push(Peer& peer, int64_t rank) {
    while (!peer.sending.empty()) {
      Message& message = peer.sending.front();
      iovec parts[2];
      msghdr what{};
      what.msg_iov = parts;
      what.msg_iovlen = size_t(message.parts(parts));
      const ssize_t sent = sendmsg(peer.fd, &what, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        fail(rank, false, "%s", std::strerror(errno));
      }
      message.done += uint64_t(sent);
      if (message.complete()) peer.sending.pop_front();
    }
  }

  // Takes as much as has come of the messages that are expected.
  void pull(Peer& peer, int64_t rank) {
    while (!peer.receiving.empty()) {
      Message& message = peer.receiving.front();
      iovec parts[2];
      msghdr what{};
      what.msg_iov = parts;
      what.msg_iovlen = size_t(message.parts(parts));
      const ssize_t got = recvmsg(peer.fd, &what, MSG_DONTWAIT);
      if (got == 0) fail(rank, false, "Connection closed by peer");
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
        fail(rank, false, "%s", std::strerror(errno));
      }
      const uint64_t before = message.arrived();
      message.done += uint64_t(got);
      message.checksum = crc32c(message.checksum, message.bytes + before, message.arrived() - before);
      const bool same = message.header.bytes == message.expected_bytes && message.header.tag == message.expected_tag;
      if (message.done >= sizeof message.header && !same)
        fail(rank, false, "a message of %llu bytes with tag %u came where one of %llu bytes with tag %u was expected: the ranks do not "
             "run the same plan, or the network changed bytes", Unsigned(message.header.bytes), message.header.tag,
             Unsigned(message.expected_bytes), message.expected_tag);
      if (!message.complete()) return;  // less came than there was room for
      if (message.checksum != message.header.checksum)
        fail(rank, true, "the checksum of %llu bytes was %08x before they were sent and is %08x now",
             Unsigned(message.expected_bytes), message.header.checksum, message.checksum);
      peer.receiving.pop_front();
    }
  }

  using Unsigned = unsigned long long;

  // Wakes when the rest of the message is there, or a good part of it.
  static void wake_at(Peer& peer) {
    const Message& message = peer.receiving.front();
    const uint64_t rest = message.total() - message.done;
    const int bytes = rest < uint64_t(kWakeBytes) ? int(rest) : kWakeBytes;
    if (bytes == peer.wakes_at) return;
    peer.wakes_at = bytes;
    setsockopt(peer.fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);  // where it fails poll wakes more often
  }

  // Moves messages in both directions until `done`. `awaited` is named when that takes longer than the timeout.
  template <class Done>
  void wait(int64_t awaited, const char* what, const Done& done) {
    if (done()) return;
    const double until = seconds_of(CLOCK_MONOTONIC) + timeout_s_;
    while (!done()) {
      polled_.clear();
      ranks_.clear();
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        Peer& peer = peers_[rank];
        if (peer.fd < 0 || peer.idle()) continue;
        short events = 0;
        if (!peer.receiving.empty()) {
          wake_at(peer);
          events |= POLLIN;
        }
        if (!peer.sending.empty()) events |= POLLOUT;
        polled_.push_back({peer.fd, events, 0});
        ranks_.push_back(int64_t(rank));
      }
      const double rest = until - seconds_of(CLOCK_MONOTONIC);
      const int count = rest <= 0 ? 0 : poll(polled_.data(), nfds_t(polled_.size()), rest < 60 ? int(1e3 * rest) + 1 : 60'000);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(awaited, false, "%s", std::strerror(errno));
      if (count == 0 && rest <= 0) fail(awaited, false, "Timed out waiting %.0f s for %s", timeout_s_, what);
      for (size_t at = 0; at < polled_.size(); ++at) {
        Peer& peer = peers_[size_t(ranks_[at])];
        const short happened = polled_[at].revents;
        if (happened & (POLLOUT | POLLERR | POLLHUP)) push(peer, ranks_[at]);
        if (happened & (POLLIN | POLLERR | POLLHUP)) pull(peer, ranks_[at]);
      }
    }
  }

  std::vector<Peer> peers_;
  Encoded summed_{};  // what was encoded or sent last, where it has not changed since
  double timeout_s_;
  std::vector<pollfd> polled_;
  std::vector<int64_t> ranks_;
};

// Calls copy(where a row lies, its first element in `packed`, elements): rows follow one another in `packed`.
template <class Copy>
void each_row(const Tensor& segments, const Tensor& flat, const Tensor& packed, const Copy& copy) {
  const Table table = table_of(segments, flat, 1);
  int64_t at = 0;
  for (int64_t i = 0; i < table.count; ++i) {
    const Segment& s = table.rows[i];
    GW_CHECK(s.numel <= packed.numel - at, "the rows have more elements than the %lld of the packed tensor",
             Long(packed.numel));
    copy(static_cast<char*>(table.data) + table.placed[i].offset * item_bytes(dtype_of(flat)), at, s.numel);
    at += s.numel;
  }
  GW_CHECK(at == packed.numel, "the rows have %lld elements and the packed tensor has %lld", Long(at), Long(packed.numel));
}

}  // namespace
}  // namespace gradwire

using namespace gradwire;

// Runs operations, in order. `fds` has the socket of each rank, -1 for the own one. `times`: where not NULL, begin and end of each
// operation in seconds of CLOCK_MONOTONIC. Returns 0, or 1 with the rest in `outcome`.
extern "C" __attribute__((visibility("default"))) int64_t gw_run_operations(const int64_t* fds, int64_t ranks, double timeout_s,
                                                                            const Operation* operations, int64_t count,
                                                                            double* times, Outcome* outcome) {
  *outcome = {};
  int64_t at = 0;
  const double cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  double waited_cpu = 0.0;
  try {
    Phase phase(fds, ranks, timeout_s);
    std::vector<size_t> left(size_t(ranks), 0);  // messages that are expected after the next one
    for (int64_t i = 0; i < count; ++i)
      if (operations[i].kind == kReceive) {
        phase.expect(operations[i]);
        ++left[size_t(operations[i].peer)];
      }
    for (; at < count; ++at) {
      const Operation& operation = operations[at];
      if (times) times[2 * at] = seconds_of(CLOCK_MONOTONIC);
      if (operation.kind == kCall) {
        const auto function = reinterpret_cast<const char* (*)(const int64_t*)>(operation.target);
        Encoded encoded{};
        asked = &encoded;
        const char* const words = function(operation.arguments);
        asked = nullptr;
        if (words) {
          std::snprintf(outcome->words, sizeof outcome->words, "%s", words);
          outcome->operation = at;
          outcome->peer = -1;
          return 1;
        }
        phase.called(encoded);
      } else {
        const double before = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        if (operation.kind == kSend) phase.send(operation);
        else if (operation.kind == kReceive) phase.receive(operation, --left[size_t(operation.peer)]);
        else phase.flush();
        waited_cpu += seconds_of(CLOCK_THREAD_CPUTIME_ID) - before;
      }
      if (times) times[2 * at + 1] = seconds_of(CLOCK_MONOTONIC);
    }
  } catch (const Failed& failed) {
    std::snprintf(outcome->words, sizeof outcome->words, "%s", failed.words);
    outcome->operation = at;
    outcome->peer = failed.peer;
    outcome->damaged = failed.damaged;
    return 1;
  } catch (const std::exception& error) {
    std::snprintf(outcome->words, sizeof outcome->words, "%s", error.what());
    outcome->operation = at;
    outcome->peer = -1;
    return 1;
  }
  outcome->codec_seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu - waited_cpu;
  return 0;
}

// Copies a tensor, in the dtype of `into`. float32, bfloat16 and float16; or bytes.
GW_API gw_copy_into(const Tensor* into, const Tensor* source) {
  return guarded([&] {
    GW_CHECK(into->contiguous && source->contiguous && into->numel == source->numel, "a copy is as long as its source");
    if (into->dtype == kUint8 && source->dtype == kUint8) {
      std::memcpy(into->data, source->data, size_t(into->numel));
      return;
    }
    kernels().cast_decode(bytes_of(*source), dtype_of(*source), into->data, dtype_of(*into), false, into->numel);
  });
}

// Adds one tensor to another.
GW_API gw_add_into(const Tensor* into, const Tensor* source) {
  return guarded([&] {
    GW_CHECK(into->contiguous && source->contiguous && into->numel == source->numel, "a term is as long as its sum");
    kernels().cast_decode(bytes_of(*source), dtype_of(*source), into->data, dtype_of(*into), true, into->numel);
  });
}

// Gathers the elements of rows of a flat buffer, in its dtype or as float32, or adds them to float32.
GW_API gw_gather_rows(const Tensor* flat, const Tensor* segments, bool add, const Tensor* packed) {
  return guarded([&] {
    const Dtype own = dtype_of(*flat), into = dtype_of(*packed);
    GW_CHECK(packed->contiguous && (flat->contiguous || flat->places) && (own == into || into == Dtype::float32),
             "rows are gathered in their own dtype, or as float32");
    check_add(add, *packed);
    const float factor = factor_of(*flat);
    each_row(*segments, *flat, *packed, [&](const char* from, int64_t at, int64_t numel) {
      char* const to = static_cast<char*>(packed->data) + at * item_bytes(into);
      if (own == into && factor == 1.0f && !add) std::memcpy(to, from, size_t(numel * item_bytes(own)));
      else kernels().scale_into(from, own, factor, to, into == Dtype::float32, add, numel);
    });
  });
}

// Multiplies the elements of rows that lie apart by their factor. float32.
GW_API gw_scale_rows(const Tensor* flat, const Tensor* segments) {
  return guarded([&] {
    GW_CHECK(flat->places && dtype_of(*flat) == Dtype::float32, "rows are scaled where they lie apart, in float32");
    const Table table = table_of(*segments, *flat, 1);
    for (int64_t i = 0; i < table.count; ++i)
      kernels().scale(static_cast<float*>(table.data) + table.placed[i].offset, factor_of(*flat), table.placed[i].numel);
  });
}

// Puts elements back into rows of a flat buffer, or adds them.
GW_API gw_scatter_rows(const Tensor* packed, const Tensor* segments, bool add, const Tensor* flat) {
  return guarded([&] {
    GW_CHECK(packed->contiguous && (flat->contiguous || flat->places), "rows are scattered between dense tensors");
    const Dtype from = dtype_of(*packed), into = dtype_of(*flat);
    each_row(*segments, *flat, *packed, [&](char* to, int64_t at, int64_t numel) {
      kernels().cast_decode(bytes_of(*packed) + at * item_bytes(from), from, to, into, add, numel);
    });
  });
}

GW_PACKED(copy_into)
GW_PACKED(add_into)
GW_PACKED(gather_rows)
GW_PACKED(scale_rows)
GW_PACKED(scatter_rows)
