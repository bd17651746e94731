# cmake -DBUILD=... -DSOURCE=... -DGENERATOR=... -DCXX=... -DLLAMA=... [-DBUILD_TYPE=... -DSANITIZE=... -DAPPS=...]
#       -P install_test.cmake
# Installs what BUILD holds and builds examples/ask with it as a stranger would: by find_package, from a folder with a space
# in its name. Then the example and the installed program must run.
set(work "${BUILD}/install test")
set(prefix "${work}/prefix")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

function(run result)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE out ERROR_VARIABLE err RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}\n${out}${err}")
  endif()
  set(${result} "${out}" PARENT_SCOPE)
endfunction()

run(log "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}" --config "${BUILD_TYPE}")
file(GLOB_RECURSE installed RELATIVE "${prefix}/include" "${prefix}/include/*")
file(GLOB public RELATIVE "${SOURCE}/include" "${SOURCE}/include/fathom/*.h")
if(NOT installed STREQUAL public)
  message(FATAL_ERROR "include/ must hold the public headers and nothing else: ${installed}")
endif()
file(GLOB_RECURSE package "${prefix}/*fathomTargets*.cmake")
foreach(file IN LISTS package)
  file(READ "${file}" text)
  string(FIND "${text}" "${SOURCE}" place)
  if(NOT place EQUAL -1 OR text MATCHES "fathom_warnings|Eigen")
    message(FATAL_ERROR "${file} names the source folder or a dependency that is only ours")
  endif()
endforeach()

set(sanitize)
if(SANITIZE)
  set(sanitize "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
run(log "${CMAKE_COMMAND}" -S "${SOURCE}/examples/ask" -B "${work}/build" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}"
        "-DCMAKE_BUILD_TYPE=${BUILD_TYPE}" "-DCMAKE_PREFIX_PATH=${prefix};${LLAMA}" ${sanitize})
run(log "${CMAKE_COMMAND}" --build "${work}/build")

file(WRITE "${work}/note.txt" "The locker number of the harbour library is 4820617.\n"
                              "The access code of the north tower is 8306194.\n")
run(answer "${work}/build/ask" "${SOURCE}/models/fathom-recall-15m-q8_0.gguf" "${work}/note.txt"
           "What is the locker number of the harbour library?")
if(NOT answer MATCHES "4820617" OR answer MATCHES "8306194")
  message(FATAL_ERROR "wrong answer: ${answer}")
endif()
if(APPS)
  run(log "${prefix}/bin/fathom" --version)
endif()
file(REMOVE_RECURSE "${work}")
