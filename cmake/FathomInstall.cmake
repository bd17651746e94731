# `cmake --install`: the public headers, the libraries, the program, and a package for find_package(fathom). The libraries
# were listed for it by fathom_module.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fathom)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fathom DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
get_property(modules GLOBAL PROPERTY FATHOM_MODULES)
install(TARGETS fathom ${modules} EXPORT fathomTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT fathomTargets NAMESPACE fathom:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fathomConfig.cmake.in ${PROJECT_BINARY_DIR}/fathomConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fathomConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fathomConfig.cmake ${PROJECT_BINARY_DIR}/fathomConfigVersion.cmake
        DESTINATION ${package_dir})

if(FATHOM_APPS)
  # ggml and libllama stay where they are; the installed program must find them there. (INSTALL_RPATH_USE_LINK_PATH leaves
  # out folders inside the source folder, where .deps is.)
  set_target_properties(fathom_cli PROPERTIES INSTALL_RPATH $<TARGET_FILE_DIR:llama>)
  install(TARGETS fathom_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
