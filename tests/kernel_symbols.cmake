# cmake -DNM=... -DLIBRARY=... -P kernel_symbols.cmake
# The kernel files are compiled for instructions that the machine may lack. An inline function or
# template that one of them exports could be the copy the linker keeps for the whole program, so each
# may define its table and nothing else that others can see.
execute_process(COMMAND ${NM} -A --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols
                RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${NM} failed on ${LIBRARY}")
endif()
string(REPLACE "\n" ";" symbols "${symbols}")
set(tables 0)
foreach(line IN LISTS symbols)
  # archive:member:address type name; lower-case types are local but for u, v and w.
  if(line MATCHES "kernels_[a-z0-9]+\\.cc\\.o.* [A-Zuvw] (.+)$")
    set(symbol "${CMAKE_MATCH_1}")
    if(symbol MATCHES "^_ZN6fathom3cpu[0-9]+[A-Za-z0-9]+KernelsEv$")
      math(EXPR tables "${tables} + 1")
    elseif(NOT symbol MATCHES "^DW\\.ref\\.|^__odr_asan")  # of the compiler, no code
      message(SEND_ERROR "a kernel file exports ${line}")
    endif()
  endif()
endforeach()
if(tables EQUAL 0)
  message(FATAL_ERROR "no kernel table found in ${LIBRARY}")
endif()
