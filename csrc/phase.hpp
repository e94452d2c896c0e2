// The messages of one list of operations: what is on its way to and from other ranks, by TCP or through rings in shared memory.
#pragma once
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <vector>

#include "checksum.hpp"
#include "packed.hpp"
#include "ring.hpp"
#include "tls.hpp"

namespace gradwire {
namespace {

enum Kind : int64_t { kCall, kSend, kReceive, kFlush, kReceiveElements };

// Twin of `Operation` in src/gradwire/transport/operations.py.
struct Operation {
  int64_t kind;
  int64_t peer;           // of a message: whose connection
  void* target;           // of a call the function in its packed form, of a message the first byte
  int64_t arguments[10];  // of a call its arguments, of a message the number of bytes and a tag; of elements also the dtype that
                          // comes, that of the target, and whether they are added
};

// Twin of `Connection` in src/gradwire/transport/rings.py: how to reach another rank. The rings are NULL where messages go by TCP.
struct Connection {
  int64_t fd = -1;       // of the own rank -1
  Ring* out = nullptr;   // what this rank writes
  Ring* in = nullptr;    // what it reads
  int64_t bell = -1;     // rings for this rank
  int64_t peer_bell = -1;
  uint64_t capacity = 0;  // of each ring
  const TlsSession* tls = nullptr;  // of a connection that is encrypted
};

struct Header {
  uint64_t bytes;
  uint32_t tag;
  uint32_t checksum;
};

// Bytes that come before poll wakes the thread; less where less is left of the message.
constexpr int kWakeBytes = 1 << 18;

// So long a thread sleeps at most. Then it looks at what came: a message that nobody expects may be too short to wake it.
constexpr double kSleepSeconds = 1.0;

// Bytes of elements that are taken from a connection at once. Of a ring kRingStep are.
constexpr uint64_t kStep = 1 << 17;

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// A message under way: its header, its bytes, and in a ring the checksum behind these, since the sender sums them as it copies them.
struct Message {
  Header header;
  char* bytes;
  uint64_t done = 0;      // bytes of all that
  uint32_t checksum = 0;  // of what arrived or, with `sums`, was sent
  bool sums = false;
  uint64_t behind = 0;    // the checksum behind the bytes
  uint64_t behind_bytes = 0;
  uint64_t expected_bytes;
  uint32_t expected_tag;
  bool elements = false;  // what arrives is copied or added to `bytes`, element by element
  bool in_turn = true;    // elements arrive when the list has come to them, so that a sum has one order
  bool add = false;
  Dtype from{}, into{};

  uint64_t total() const { return sizeof header + expected_bytes + behind_bytes; }
  bool complete() const { return done == total(); }
  uint64_t arrived() const { return done < sizeof header ? 0 : std::min(done - sizeof header, expected_bytes); }  // of the bytes

  // What is left; of a message in a ring the first part alone counts.
  int parts(iovec* into) {
    int count = 0;
    if (done < sizeof header) into[count++] = {reinterpret_cast<char*>(&header) + done, sizeof header - done};
    const uint64_t at = arrived();
    if (at < expected_bytes) into[count++] = {bytes + at, expected_bytes - at};
    const uint64_t rest = total() - done;
    if (behind_bytes && rest <= behind_bytes) into[count++] = {reinterpret_cast<char*>(&behind) + (behind_bytes - rest), rest};
    return count;
  }
};

// Takes no memory while it is empty.
template <class Item>
class Queue {
 public:
  bool empty() const { return first_ == items_.size(); }
  size_t size() const { return items_.size() - first_; }
  Item& front() { return items_[first_]; }
  const Item& front() const { return items_[first_]; }
  void push_back(const Item& item) { items_.push_back(item); }

  void pop_front() {
    if (++first_ < items_.size()) return;
    items_.clear();
    first_ = 0;
  }

 private:
  std::vector<Item> items_;
  size_t first_ = 0;
};

// Another rank, which messages of the list go to or come from.
struct Peer {
  int64_t rank;
  Connection by;
  int fd;
  int wakes_at = 0;                               // of the connection
  uint64_t reader_wakes_at = 0, writer_wakes_at = 0;  // of the rings, since the last wait
  size_t left = 0;                                // messages that are expected after the next one
  Queue<Message> sending, receiving;              // in order; what is complete leaves the front
  Queue<uint32_t> checksums;                      // of messages that are complete and that the list has not come to

  Peer(int64_t number, const Connection& connection) : rank(number), by(connection), fd(int(connection.fd)) {}
  bool reads() const { return !receiving.empty() && receiving.front().in_turn; }
  bool idle() const { return sending.empty() && !reads(); }
  bool shares() const { return by.out; }
  bool encrypts() const { return by.tls; }
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
  // Of all ranks only those of the list cost time, here and in each wait.
  Phase(const Connection* connections, int64_t ranks, double timeout_s, const Operation* operations, int64_t count)
      : place_(size_t(ranks), kNoPlace), timeout_s_(timeout_s) {
    size_t used = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (operations[i].kind == kCall || operations[i].kind == kFlush) continue;
      int32_t& place = place_[size_t(operations[i].peer)];
      used += place == kNoPlace;
      place = 0;
    }
    peers_.reserve(used);
    for (int64_t rank = 0; rank < ranks && peers_.size() < used; ++rank) {
      if (place_[size_t(rank)] == kNoPlace) continue;
      place_[size_t(rank)] = int32_t(peers_.size());
      peers_.emplace_back(rank, connections[rank]);
    }
    for (int64_t i = 0; i < count; ++i)
      if (operations[i].kind == kReceive || operations[i].kind == kReceiveElements) expect(operations[i]);
  }

  void send(const Operation& operation) {
    Peer& peer = peer_of(operation);
    Message message = message_of(operation, peer);
    const bool known = message.bytes == summed_.payload && message.expected_bytes == summed_.count;
    if (!known && !peer.shares())
      summed_ = {message.bytes, message.expected_bytes, crc32c(0, message.bytes, message.expected_bytes)};
    message.sums = !known && peer.shares();
    if (!message.sums) message.behind = message.header.checksum = summed_.checksum;
    peer.sending.push_back(message);
    push(peer);
    if (message.sums && peer.sending.empty()) summed_ = {message.bytes, message.expected_bytes, last_sum_};
  }

  // A call may have changed what was sent before. `encoded` is what it encoded, if it summed that on its way.
  void called(const Encoded& encoded) { summed_ = encoded; }

  // Until the next message of this peer is complete.
  void receive(const Operation& operation) {
    Peer& peer = peer_of(operation);
    --peer.left;
    summed_ = {};  // what arrives may lie where something was sent from
    if (peer.receiving.size() > peer.left) peer.receiving.front().in_turn = true;
    pull(peer);
    wait(peer.rank, "a message", [&] { return peer.receiving.size() <= peer.left; });
    // these bytes may be sent on as they are
    if (operation.kind == kReceive)
      summed_ = {static_cast<const char*>(operation.target), uint64_t(operation.arguments[0]), peer.checksums.front()};
    peer.checksums.pop_front();
  }

  void flush() {
    for (const Peer& peer : peers_)
      wait(peer.rank, "room for a message", [&] { return peer.sending.empty(); });
  }

 private:
  static constexpr int32_t kNoPlace = -1;

  Peer& peer_of(const Operation& operation) { return peers_[size_t(place_[size_t(operation.peer)])]; }

  void expect(const Operation& operation) {
    Peer& peer = peer_of(operation);
    Message message = message_of(operation, peer);
    message.elements = operation.kind == kReceiveElements;
    if (message.elements) {
      message.in_turn = false;
      message.from = Dtype(operation.arguments[2]);
      message.into = Dtype(operation.arguments[3]);
      message.add = operation.arguments[4];
    }
    peer.receiving.push_back(message);
    ++peer.left;
  }

  static Message message_of(const Operation& operation, const Peer& peer) {
    Message message;
    message.behind_bytes = peer.shares() ? sizeof message.behind : 0;
    message.expected_bytes = uint64_t(operation.arguments[0]);
    message.expected_tag = uint32_t(operation.arguments[1]);
    message.header = {message.expected_bytes, message.expected_tag, 0};
    message.bytes = static_cast<char*>(operation.target);
    return message;
  }

  // Moves bytes by `call`, sendmsg or recvmsg; 0 where it would have to wait, or for the end of what comes.
  template <class Call>
  static uint64_t by_tcp(iovec* parts, int count, int64_t rank, const Call& call) {
    msghdr what{};
    what.msg_iov = parts;
    what.msg_iovlen = size_t(count);
    while (true) {
      const ssize_t moved = call(&what);
      if (moved >= 0) return uint64_t(moved);
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      if (errno != EINTR) fail(rank, false, "%s", std::strerror(errno));
    }
  }

  // Moves bytes of an encrypted connection; 0 where it would have to wait.
  template <class Call>
  static uint64_t encrypted(const Peer& peer, const Call& call) {
    const char* problem = nullptr;
    bool damaged = false;
    const size_t moved = by_tls(*peer.by.tls, problem, damaged, call);
    if (problem) fail(peer.rank, damaged, "%s", problem);
    return moved;
  }

  uint64_t send_some(Peer& peer, Message& message) {
    iovec parts[2];
    const int count = message.parts(parts);
    if (peer.encrypts() && !peer.shares()) {
      iovec part = parts[0];
      if (count > 1) {  // a header and the first bytes are encrypted together
        const size_t more = std::min(parts[1].iov_len, kRecord - part.iov_len);
        std::memcpy(record_, part.iov_base, part.iov_len);
        std::memcpy(record_ + part.iov_len, parts[1].iov_base, more);
        part = {record_, part.iov_len + more};
      }
      return encrypted(peer, [&](const TlsSession& tls, size_t* moved) {
        return tls.write(tls.ssl, part.iov_base, part.iov_len, moved);
      });
    }
    if (!peer.shares())
      return by_tcp(parts, count, peer.rank, [&](msghdr* what) { return sendmsg(peer.fd, what, MSG_DONTWAIT | MSG_NOSIGNAL); });
    const Connection& by = peer.by;
    return put(*by.out, by.capacity, int(by.peer_bell), static_cast<const char*>(parts[0].iov_base), parts[0].iov_len);
  }

  // Takes bytes of a message to where they belong, and sums them.
  uint64_t receive_some(Peer& peer, Message& message) {
    const uint64_t before = message.arrived();
    if (message.elements && before < message.expected_bytes) return use_some(peer, message);
    iovec parts[2];
    const int count = message.parts(parts);
    const uint64_t got = take_some(peer, parts, count);
    message.done += got;
    message.checksum = crc32c(message.checksum, message.bytes + before, message.arrived() - before);
    if (message.done >= sizeof message.header) compare(peer, message);
    return got;
  }

  // Whether the message that comes is the one that is expected.
  static void compare(const Peer& peer, const Message& message) {
    if (message.header.bytes == message.expected_bytes && message.header.tag == message.expected_tag) return;
    fail(peer.rank, false, "a message of %llu bytes with tag %u came where one of %llu bytes with tag %u was expected: the ranks "
         "do not run the same plan, or the network changed bytes", Unsigned(message.header.bytes), message.header.tag,
         Unsigned(message.expected_bytes), message.expected_tag);
  }

  // Takes bytes that have come from a peer; of a ring or an encrypted connection into the first part alone.
  static uint64_t take_some(Peer& peer, iovec* parts, int count) {
    const Connection& by = peer.by;
    if (peer.shares()) return take(*by.in, by.capacity, int(by.peer_bell), static_cast<char*>(parts[0].iov_base), parts[0].iov_len);
    if (peer.encrypts())
      return encrypted(peer, [&](const TlsSession& tls, size_t* moved) {
        return tls.read(tls.ssl, parts[0].iov_base, parts[0].iov_len, moved);
      });
    return by_tcp(parts, count, peer.rank, [&](msghdr* what) {
      const ssize_t came = recvmsg(peer.fd, what, MSG_DONTWAIT);
      if (came == 0) fail(peer.rank, false, "%s", kClosed);
      return came;
    });
  }

  // Copies or adds elements from a step that lies in a near cache. One that is not whole yet stays there: of a list only one
  // message is in its turn. The header, which may come with the first step, is compared before any of them is used.
  uint64_t use_some(Peer& peer, Message& message) {
    const uint64_t item = uint64_t(item_bytes(message.from)), at = message.arrived(), begun = at % item;
    const uint64_t missing = sizeof message.header - std::min<uint64_t>(message.done, sizeof message.header);
    iovec parts[2];
    message.parts(parts);
    parts[missing ? 1 : 0] = {step_ + begun, std::min(message.expected_bytes - at, kStep)};
    const uint64_t came = take_some(peer, parts, missing ? 2 : 1);
    message.done += came;
    if (missing && came >= missing) compare(peer, message);
    if (came <= missing) return came;
    const uint64_t got = came - missing;
    message.checksum = crc32c(message.checksum, step_ + begun, got);
    const uint64_t whole = (begun + got) / item;
    char* const into = message.bytes + at / item * uint64_t(item_bytes(message.into));
    kernels().cast_decode(reinterpret_cast<const uint8_t*>(step_), message.from, into, message.into, message.add, int64_t(whole));
    std::memmove(step_, step_ + whole * item, begun + got - whole * item);
    return came;
  }

  // Sends as much as there is room for.
  void push(Peer& peer) {
    while (!peer.sending.empty()) {
      Message& message = peer.sending.front();
      const uint64_t sent = send_some(peer, message);
      if (!sent) return;
      const uint64_t before = message.arrived();
      message.done += sent;
      moved_ += sent;
      if (message.sums) {
        message.checksum = crc32c(message.checksum, message.bytes + before, message.arrived() - before);
        message.behind = message.checksum;
        last_sum_ = message.checksum;
      }
      if (message.complete()) peer.sending.pop_front();
    }
  }

  // Takes as much as has come of the messages that are expected. Between two steps of elements it sends what has room, so that
  // both directions move while elements are added.
  void pull(Peer& peer) {
    while (peer.reads()) {
      Message& message = peer.receiving.front();
      const uint64_t got = receive_some(peer, message);
      if (!got) return;
      moved_ += got;
      if (message.elements || peer.encrypts()) push(peer);
      if (!message.complete()) {
        if (peer.shares() || peer.encrypts() || message.elements) continue;
        return;  // less came than there was room for
      }
      const uint32_t sent = peer.shares() ? uint32_t(message.behind) : message.header.checksum;
      if (message.checksum != sent || (peer.shares() && message.behind >> 32))
        fail(peer.rank, true, "the checksum of %llu bytes was %08x before they were sent and is %08x now",
             Unsigned(message.expected_bytes), sent, message.checksum);
      peer.checksums.push_back(message.checksum);
      peer.receiving.pop_front();
    }
  }

  using Unsigned = unsigned long long;

  // Wakes when the rest of the message is there, or a good part of it.
  static void wake_at(Peer& peer) {
    const Message& message = peer.receiving.front();
    const uint64_t rest = message.total() - message.done;
    int bytes = rest < uint64_t(kWakeBytes) ? int(rest) : kWakeBytes;
    if (peer.encrypts()) bytes = std::max(1, bytes - kHeldBytes);  // a part may be on this side of the socket already
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
      const bool ready = prepare_wait();
      const double rest = until - seconds_of(CLOCK_MONOTONIC);
      const int longest_ms = ready || rest <= 0 ? 0 : int(1e3 * std::min(rest, kSleepSeconds)) + 1;
      const int count = poll(polled_.data(), nfds_t(polled_.size()), longest_ms);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) fail(awaited, false, "%s", std::strerror(errno));
      const uint64_t before = moved_;
      for (size_t at = 0; at < polled_.size(); ++at) {
        Peer& peer = *polled_peers_[at];
        if (peer.shares()) {  // its connection and its bell
          go_on(peer, polled_[at].revents, polled_[at + 1].revents);
          ++at;
          continue;
        }
        const short happened = polled_[at].revents;
        if (happened & POLLNVAL) fail(peer.rank, false, "%s", std::strerror(EBADF));
        if (happened & (POLLOUT | POLLERR | POLLHUP)) push(peer);
        if (count == 0 || happened & (POLLIN | POLLERR | POLLHUP)) pull(peer);
      }
      // whatever poll says: a ring whose head is damaged may be ready for ever
      if (rest <= 0 && moved_ == before) fail(awaited, false, "Timed out waiting %.0f s for %s", timeout_s_, what);
    }
  }

  // Lists what to wait for. Whether a ring can go on already.
  bool prepare_wait() {
    polled_.clear();
    polled_peers_.clear();
    bool shares = false, ready = false;
    for (Peer& peer : peers_) {
      if (peer.fd < 0 || peer.idle()) continue;
      if (peer.shares()) {
        tell_wait(peer);
        watch(peer.fd, POLLIN, peer);
        watch(int(peer.by.bell), POLLIN, peer);
        shares = true;
        continue;
      }
      if (peer.reads()) wake_at(peer);
      watch(peer.fd, short((peer.reads() ? POLLIN : 0) | (peer.sending.empty() ? 0 : POLLOUT)), peer);
    }
    if (!shares) return false;
    for (const Peer& peer : peers_)
      if (peer.shares() && !peer.idle()) ready |= can_go_on(peer);
    return ready;
  }

  void watch(int fd, short events, Peer& peer) {
    polled_.push_back({fd, events, 0});
    polled_peers_.push_back(&peer);
  }

  static uint64_t good_part(const Connection& by, const Message& message) {
    return std::min(message.total() - message.done, by.capacity / 2);
  }

  static void tell_wait(Peer& peer) {
    const Connection& by = peer.by;
    if (peer.reads()) {
      peer.reader_wakes_at = by.in->read.load(std::memory_order_relaxed) + good_part(by, peer.receiving.front());
      by.in->reader_wakes_at.store(peer.reader_wakes_at, std::memory_order_seq_cst);
    }
    if (!peer.sending.empty()) {
      const uint64_t at = by.out->written.load(std::memory_order_relaxed) + good_part(by, peer.sending.front());
      peer.writer_wakes_at = at > by.capacity ? at - by.capacity : 0;
      by.out->writer_wakes_at.store(peer.writer_wakes_at, std::memory_order_seq_cst);
    }
  }

  static bool can_go_on(const Peer& peer) {
    const uint64_t written = peer.by.in->written.load(std::memory_order_seq_cst);
    const uint64_t read = peer.by.out->read.load(std::memory_order_seq_cst);
    return (peer.reads() && written >= peer.reader_wakes_at) || (!peer.sending.empty() && read >= peer.writer_wakes_at);
  }

  // Moves what can be moved through rings. A connection that wakes is closed: no bytes travel on it.
  void go_on(Peer& peer, short closed, short rung) {
    uint64_t rings;
    peer.by.in->reader_wakes_at.store(0, std::memory_order_relaxed);
    peer.by.out->writer_wakes_at.store(0, std::memory_order_relaxed);
    if (rung && read(int(peer.by.bell), &rings, sizeof rings) < 0 && errno != EAGAIN && errno != EINTR)
      fail(peer.rank, false, "%s", std::strerror(errno));
    push(peer);
    pull(peer);
    if (!closed || peer.idle()) return;
    char byte;
    const ssize_t got = recv(peer.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    fail(peer.rank, false, "%s", got == 0 ? kClosed : got < 0 ? std::strerror(errno) : "bytes came beside the rings");
  }

  std::vector<int32_t> place_;  // of each rank in `peers_`
  std::vector<Peer> peers_;     // in the order of ranks; none moves, since others point to it
  Encoded summed_{};        // what was encoded or sent last, where it has not changed since
  uint32_t last_sum_ = 0;   // of the last message that was summed as it was sent
  uint64_t moved_ = 0;      // bytes, in both directions
  alignas(64) char step_[kStep + sizeof(double)];  // elements on their way
  char record_[kRecord];  // the begin of a message that is encrypted
  double timeout_s_;
  std::vector<pollfd> polled_;
  std::vector<Peer*> polled_peers_;
};

}  // namespace
}  // namespace gradwire
