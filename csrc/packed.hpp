// Functions of the interface with their arguments in one array of words, so that a list of calls can be made once and run later.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include "api.hpp"

namespace gradwire {

// One argument from its word: a pointer, an integer, a bool, or the bits of a double.
template <class T>
T unpacked(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    static_assert(sizeof(T) == sizeof word);
    T value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return T(word);
  }
}

template <class... Arguments, size_t... At>
const char* call_with(const char* (*function)(Arguments...), const int64_t* words, std::index_sequence<At...>) {
  return function(unpacked<Arguments>(words[At])...);
}

template <class... Arguments>
const char* call_packed(const char* (*function)(Arguments...), const int64_t* words) {
  static_assert(sizeof...(Arguments) <= 10, "an operation of an exchange has room for ten arguments");
  return call_with(function, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace gradwire

// The packed form of gw_NAME.
#define GW_PACKED(name) \
  GW_API gw_packed_##name(const int64_t* words) { return gradwire::call_packed(gw_##name, words); }
