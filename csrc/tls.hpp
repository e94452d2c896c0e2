// An encrypted connection, moved by the OpenSSL library that Python loaded.
#pragma once
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace gradwire {
namespace {

// Twin of `TlsSession` in src/gradwire/transport/tls.py: a connection of OpenSSL, and the functions that move its bytes.
struct TlsSession {
  void* ssl;
  int (*read)(void* ssl, void* into, size_t count, size_t* moved);
  int (*write)(void* ssl, const void* from, size_t count, size_t* moved);
  int (*error)(const void* ssl, int result);
  void (*clear_errors)();
  unsigned long (*last_error)();
  const char* (*words)(unsigned long error);
};

// The most bytes that TLS encrypts at once.
constexpr size_t kRecord = 1 << 14;

// What a session has read from its socket and cannot decrypt yet is less than a record with its head and seal.
constexpr int kHeldBytes = 1 << 15;

// SSL_ERROR_WANT_READ, SSL_ERROR_WANT_WRITE, SSL_ERROR_SYSCALL and SSL_ERROR_ZERO_RETURN of OpenSSL.
constexpr int kWantsRead = 2, kWantsWrite = 3, kSystemCall = 5, kEnded = 6;

constexpr const char* kClosed = "Connection closed by peer";

// Moves bytes by `call`, read or write. Returns how many; 0 with `problem` NULL where it would have to wait. `damaged`: whether
// bytes came that the other rank did not encrypt.
template <class Call>
size_t by_tls(const TlsSession& session, const char*& problem, bool& damaged, const Call& call) {
  size_t moved = 0;
  session.clear_errors();
  errno = 0;
  const int result = call(session, &moved);
  if (result > 0) return moved;
  const int number = errno;
  const int error = session.error(session.ssl, result);
  if (error == kWantsRead || error == kWantsWrite) return 0;
  if (error == kEnded || error == kSystemCall) {
    problem = error == kSystemCall && number ? std::strerror(number) : kClosed;
    return 0;
  }
  const char* const words = session.words(session.last_error());
  problem = words ? words : "TLS failed";
  if (std::strstr(problem, "unexpected eof")) problem = kClosed;
  else damaged = !std::strstr(problem, "alert");  // an alert comes from the other rank
  return 0;
}

}  // namespace
}  // namespace gradwire
